"""Cases of the products of deep_comm.tp: calls of one SymmetricMemory, and what the reference says.

Values are small integers, so that sums of products are exact in every order, but for a factor of
each rank, by which sums of ranks are rounded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from collectives import FLOATS
from graph_bodies import captured
from torch import Tensor

from deep_comm import tp
from deep_comm.reference import tp as reference
from deep_comm.symmetric import SymmetricMemory

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Product:
    op: str
    method: str
    rows: int  # of a rank
    depth: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    is_n_major: bool = True  # the weight is contiguous, not its transpose


@dataclass(frozen=True)
class ProductCase:
    num_ranks: int
    calls: tuple[Product, ...]
    staging_bytes: int = 1 << 15

    def expected(self) -> list[list[Tensor]]:
        """By call, then by rank."""
        found = []
        for number, product in enumerate(self.calls):
            given = [
                operands(product, self.num_ranks, rank, number) for rank in range(self.num_ranks)
            ]
            x, weights = [pair[0] for pair in given], [pair[1] for pair in given]
            outs = getattr(reference, product.op)(x, weights)
            if product.op == "all_gather_matmul":
                outs = [torch.cat([torch.cat(x), out], dim=1) for out in outs]
            found.append(outs)
        return found


def operands(product: Product, num_ranks: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """x and weight. No two calls or ranks have the same."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    rows = product.rows * (1 if product.op == "all_gather_matmul" else num_ranks)
    x = torch.randint(-3, 4, (rows, product.depth), generator=generator)
    weight = torch.randint(-3, 4, (product.depth, product.columns), generator=generator)
    # Sparse, so that what is summed stays exact in 8 bits of a significand.
    weight *= torch.rand(weight.shape, generator=generator) < min(1.0, 8 / product.depth)
    scale = 1.0 if product.op == "all_gather_matmul" else (1.0, 1 / 64, 37.0, 1 / 3)[rank % 4]
    weight = (weight * scale).to(product.dtype)
    return x.to(product.dtype), weight if product.is_n_major else weight.t().contiguous().t()


def make(product: Product, x: Tensor, weight: Tensor, memory: SymmetricMemory) -> Tensor:
    method: Any = product.method
    if product.op == "all_gather_matmul":
        gathered, (out,) = tp.all_gather_matmul(
            x, weight, memory, method=method, return_gathered=True
        )
        assert gathered is not None
        return torch.cat([gathered, out], dim=1)
    if product.op == "matmul_reduce_scatter":
        return tp.matmul_reduce_scatter(x, weight, memory, method=method)
    return tp.matmul_all_reduce(x, weight, memory, method=method)


def run_case(group: Any, case: ProductCase, **options: Any) -> list[Tensor]:
    """The results of this rank, on the host."""
    options = {"device": "cpu", **options}
    results = []
    with SymmetricMemory(group, 0, staging_bytes=case.staging_bytes, **options) as memory:
        for number, product in enumerate(case.calls):
            given = operands(product, case.num_ranks, memory.rank, number)
            x, weight = (each.to(memory.device) for each in given)
            results.append(make(product, x, weight, memory))
            x.fill_(77)
        return [result.cpu() for result in results]


def random_case(seed: int, max_ranks: int = 4) -> ProductCase:
    choose = random.Random(seed)
    num_ranks = choose.randint(2, max_ranks)
    products = tuple(
        Product(
            choose.choice(OPS),
            choose.choice(("decomposed", "decomposed", "unfused", "auto")),
            choose.choice((1, 2, 5)),
            choose.choice((1, 8, 17)),
            choose.choice((1, 3, 8)),
            choose.choice(FLOATS),
            choose.choice((True, False)),
        )
        for _ in range(choose.choice((1, 2, 4)))
    )
    return ProductCase(num_ranks, products)


# ---- on GPUs -------------------------------------------------------------------------------------

METHODS_ON_GPUS = ("unfused", "decomposed", "fused")


def device_products(op: str, method: str) -> tuple[Product, ...]:
    """First calls and later ones, of shapes that divide into tiles and that do not."""
    shapes = ((128, 64, 40), (384, 200, 520), (128, 64, 40))
    if method != "fused":
        shapes = (*shapes, (3, 40, 24))
    return tuple(
        Product(op, method, *shape, dtype, is_n_major)
        for shape in shapes
        for dtype, is_n_major in ((torch.bfloat16, True), (torch.float16, False))
    )


def _memory_on(group: Any, device: torch.device, timeout_s: float = 30) -> SymmetricMemory:
    return SymmetricMemory(group, 0, staging_bytes=16 << 20, device=device, timeout_s=timeout_s)


def run_on_gpu(group: Any, device: torch.device, case: ProductCase) -> list[Tensor]:
    return run_case(group, case, device=device, timeout_s=30)


def bits_of_fused(group: Any, device: torch.device, op: str) -> str:
    """Values of any size: the order of sums shows. The product alone runs on what was gathered."""
    from deep_comm.tp import product as alone

    with _memory_on(group, device) as memory:
        ranks, rank = memory.group_size, memory.rank
        rows, depth, columns = 256, 520, 648
        of = lambda seed, *shape: (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
        )

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            out = x.new_empty((x.shape[0], weight.shape[1]))
            alone.product(x, weight, alone.CONFIGS[0], out=out, num_programs=16)
            return out

        for number in range(3):
            if op == "all_gather_matmul":
                shards = [of(10 * number + each, rows, depth) for each in range(ranks)]
                weight = of(100 + rank, depth, columns)
                _, (got,) = tp.all_gather_matmul(shards[rank], weight, memory, method="fused")
                wanted = multiply(torch.cat(shards), weight)
            else:
                xs = [of(10 * number + each, ranks * rows, depth) for each in range(ranks)]
                weights = [of(100 + each, depth, columns) for each in range(ranks)]
                got = tp.matmul_reduce_scatter(xs[rank], weights[rank], memory, method="fused")
                total = torch.zeros((ranks * rows, columns), device=device)
                for x, weight in zip(xs, weights, strict=True):
                    total += multiply(x, weight).float()
                wanted = total.bfloat16().chunk(ranks)[rank]
            torch.cuda.synchronize()
            if not torch.equal(got.view(torch.int16), wanted.view(torch.int16)):
                return f"run {number}: {int((got != wanted).sum())} elements differ"
    return ""


def replayed(group: Any, device: torch.device, op: str, method: str, replays: int) -> str:
    """A graph of three calls, replayed between eager calls, with another x each time."""
    product = Product(op, method, 128, 64, 40)
    with _memory_on(group, device) as memory:
        ranks, rank = memory.group_size, memory.rank
        rows = product.rows * (1 if op == "all_gather_matmul" else ranks)
        x = torch.zeros((rows, product.depth), dtype=torch.bfloat16, device=device)
        weight = torch.zeros((product.depth, product.columns), dtype=x.dtype, device=device)
        weight[0].fill_(1)  # a product is the first column of x
        total = torch.zeros((), dtype=torch.float64, device=device)

        def step() -> Tensor:
            x.add_(1)
            return make(product, x, weight, memory)

        step()
        graph, outs = captured(lambda: [step() for _ in range(3)], group)
        x.fill_(rank)
        group.barrier()
        value = 0
        for number in range(replays):
            graph.replay()
            outs_now = [*outs, step()] if number % 3 == 0 else outs
            total.zero_()
            for out in outs_now:
                total += out[:, -1].double().sum()
            wanted = 0.0
            for _ in outs_now:
                value += 1
                of = [each + value for each in range(ranks)]
                whole = sum(of) * product.rows
                wanted += (
                    whole
                    if op == "all_gather_matmul"
                    else sum(of) * (product.rows * (ranks if op == "matmul_all_reduce" else 1))
                )
            if total.item() != wanted:
                return f"replay {number}: {total.item()}, expected {wanted}"
            if value > 20:  # sums of eight ranks stay exact
                value = 0
                x.fill_(rank)
        memory.check()
    return ""


def late_and_absent(group: Any, device: torch.device, method: str) -> str:
    """A rank that comes late is waited for. One that does not come is named, soon; then reset."""
    import time

    from deep_comm import errors

    with _memory_on(group, device, timeout_s=4) as memory:
        x = torch.ones((256, 64), dtype=torch.bfloat16, device=memory.device)
        weight = torch.eye(64, dtype=x.dtype, device=memory.device)

        def call() -> bool:
            gathered, (out,) = tp.all_gather_matmul(x, weight, memory, method=method)  # type: ignore[arg-type]
            part = tp.matmul_reduce_scatter(x, weight, memory, method=method)  # type: ignore[arg-type]
            torch.cuda.synchronize()
            memory.check()
            return bool((out == 1).all() and (part == memory.group_size).all())

        if not call():
            return "the first call is wrong"
        group.barrier()
        if memory.rank == 1:
            time.sleep(1)
        if not call():
            return "a late rank's rows are wrong"
        group.barrier()
        if memory.rank == 0:
            began = time.perf_counter()
            try:
                call()
                return "nobody missed rank 1"
            except errors.PeerTimeout as error:
                if error.peer != 1:
                    return f"rank {error.peer} was named"
            took = time.perf_counter() - began
            if took > 10:
                return f"it took {took:.1f} s"
        group.barrier()
        memory.reset()
        return "" if call() else "wrong after reset"


def scaled_on_device(group: Any, device: torch.device) -> str:
    """FP8 through the library: decomposed has the bits of unfused, near those of float32."""
    with _memory_on(group, device) as memory:
        generator = torch.Generator().manual_seed(memory.rank)
        x = torch.randn(256, 256, generator=generator)
        weight = torch.randn(128, 256, generator=generator)
        for by_row in (False, True):
            scales = []
            for values in (x, weight):
                most = values.abs().amax(1, keepdim=True) if by_row else values.abs().amax()
                scales.append((most if by_row else torch.tensor(5.0)) / 448)
            given = [
                (values / scale).to(torch.float8_e4m3fn).to(memory.device)
                for values, scale in zip((x, weight), scales, strict=True)
            ]
            x_scale, w_scale = (scale.to(memory.device) for scale in scales)
            w_scale = w_scale.t().contiguous() if by_row else w_scale
            results = []
            for method in ("unfused", "decomposed"):
                options: Any = {"scales": (x_scale, w_scale), "method": method}
                gathered, (out,) = tp.all_gather_matmul(
                    given[0], given[1].t(), memory, return_gathered=True, **options
                )
                part = tp.matmul_reduce_scatter(given[0], given[1].t(), memory, **options)
                torch.cuda.synchronize()
                results.append((gathered, out, part))
            (_, out, part), others = results
            if not all(torch.equal(a, b) for a, b in zip(results[0][1:], others[1:], strict=True)):
                return f"by row {by_row}: unfused and decomposed differ"
            own = (x @ weight.t()).to(memory.device)
            rows = out[memory.rank * 256 : (memory.rank + 1) * 256].float()
            if (rows - own).abs().max() > 0.1 * own.abs().max():
                return f"by row {by_row}: far from float32"
            if not part.isfinite().all():
                return "not finite"
    return ""
