"""Cases of deep_comm.tp: calls of one SymmetricMemory, and what the reference says of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import local, tp
from deep_comm.reference import tp as reference
from deep_comm.symmetric import SymmetricMemory

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
OPS = ("all_gather", "reduce_scatter", "one_shot", "two_shot", "auto")
NORM = "norm"
EPS = 1e-5


@dataclass(frozen=True)
class Call:
    op: str  # of OPS; the last three are all-reduces; or NORM
    shape: tuple[int, ...]  # of x
    dtype: torch.dtype
    num_sms: int = 2
    offset: int = 0  # elements between an aligned address and x


@dataclass(frozen=True)
class CollectiveCase:
    num_ranks: int
    calls: tuple[Call, ...]
    staging_bytes: int = 1 << 15
    multicast: bool = False
    descending: bool = False  # the switch begins with the last rank

    def expected(self) -> list[list[Tensor]]:
        """By call, then by rank."""
        functions: dict[str, Callable[..., list[Tensor]]] = {
            "all_gather": reference.all_gather,
            "reduce_scatter": reference.reduce_scatter,
        }
        found = []
        for number, call in enumerate(self.calls):
            x = [x_of(call, rank, number) for rank in range(self.num_ranks)]
            if self.descending and call.op != "all_gather":
                x.reverse()
            if call.op == NORM:
                both = reference.all_reduce_norm(x, *norm_inputs(call, number), EPS)
                found.append([torch.cat(pair) for pair in both])
            else:
                found.append(functions.get(call.op, reference.all_reduce)(x))
        return found


def x_of(call: Call, rank: int, number: int) -> Tensor:
    """No two calls or ranks have the same, and sums depend on the order of the ranks."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    num_elements = torch.Size(call.shape).numel()
    if not call.dtype.is_floating_point:
        values = torch.randint(0, 100, (num_elements,), generator=generator)
    else:
        values = torch.randn(num_elements, generator=generator)
        values *= 10.0 ** torch.randint(-2, 3, (num_elements,), generator=generator)
        values[rank % 3 :: 7] = -0.0
    return values.to(call.dtype).view(call.shape)


def placed(x: Tensor, offset: int, device: torch.device) -> Tensor:
    """A copy that begins so many elements behind an aligned address."""
    memory = torch.empty(offset + x.numel(), dtype=x.dtype, device=device)
    view = memory[offset:].view(x.shape)
    view.copy_(x)
    return view


def norm_inputs(call: Call, number: int) -> tuple[Tensor, Tensor]:
    """residual and weight, alike on all ranks."""
    residual, weight = x_of(call, 90, number), x_of(call, 91, number)[0]
    return residual, weight.clamp(-4, 4)


def make(call: Call, x: Tensor, memory: SymmetricMemory, number: int = 0) -> Tensor:
    if call.op == NORM:
        given = [each.to(x.device) for each in norm_inputs(call, number)]
        both = tp.all_reduce_norm(x, *given, memory, eps=EPS, num_sms=call.num_sms)
        return torch.cat(both)
    if call.op == "all_gather":
        return tp.all_gather(x, memory, num_sms=call.num_sms)
    if call.op == "reduce_scatter":
        return tp.reduce_scatter(x, memory, num_sms=call.num_sms)
    return tp.all_reduce(x, memory, method=call.op, num_sms=call.num_sms)


def run_case(group: Any, case: CollectiveCase, **options: Any) -> list[Tensor]:
    """The results of this rank, on the host."""
    options = {"device": "cpu", "multicast": case.multicast, **options}
    results = []
    with SymmetricMemory(group, 0, staging_bytes=case.staging_bytes, **options) as memory:
        for number, call in enumerate(case.calls):
            x = placed(x_of(call, memory.rank, number), call.offset, memory.device)
            results.append(make(call, x, memory, number))
            # Nobody reads x any more.
            x.fill_(77)
        return [result.cpu() for result in results]


def verify(case: Any, results: Any) -> None:
    """Raises AssertionError unless each result has the bits that the case, of collectives or of
    products, expects."""
    for number, by_rank in enumerate(case.expected()):
        for rank, wanted in enumerate(by_rank):
            got = results[rank][number]
            name = f"call {number}, {case.calls[number]}, rank {rank}"
            assert got.shape == wanted.shape and got.dtype == wanted.dtype, name
            same = got.reshape(-1).view(torch.uint8) == wanted.reshape(-1).view(torch.uint8)
            if not same.all():
                index = int(same.logical_not().nonzero()[0]) // wanted.dtype.itemsize
                at = got.reshape(-1)[index].item(), wanted.reshape(-1)[index].item()
                raise AssertionError(f"{name}: element {index} is {at[0]}, expected {at[1]}")


ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-20}


def verify_near(case: CollectiveCase, results: Any) -> None:
    """What a switch must keep to, which adds and rounds as it likes: sums near those in rank order,
    the same bits on all ranks where one rank takes each sum, and rows normalised as they are."""
    for number, (call, by_rank) in enumerate(zip(case.calls, case.expected(), strict=True)):
        name = f"call {number}, {call}"
        sizes = [x_of(call, rank, number).float().abs() for rank in range(case.num_ranks)]
        residual, weight = norm_inputs(call, number) if call.op == NORM else (None, None)
        size = sum(sizes) if residual is None else sum(sizes) + residual.float().abs()
        bounds = (size * ROUNDING[call.dtype]).reshape(-1)
        for rank, wanted in enumerate(by_rank):
            got = results[rank][number]
            if call.op in ("two_shot", NORM):
                assert torch.equal(got, results[0][number]), f"{name}: rank {rank} is not as rank 0"
            bound = bounds.chunk(case.num_ranks)[rank] if call.op == "reduce_scatter" else bounds
            if residual is not None and weight is not None:
                normed, got = got.chunk(2)
                own = reference.all_reduce_norm([got], torch.zeros_like(got), weight, EPS)
                assert torch.equal(normed, own[0][0]), f"{name}: rank {rank} normalises otherwise"
                wanted = wanted.chunk(2)[1]
            error = (got.float() - wanted.float()).abs().reshape(-1)
            assert (error <= bound).all(), f"{name}: rank {rank} is not near the expected sums"


def random_case(seed: int, max_ranks: int = 5) -> CollectiveCase:
    """Few elements: schedules differ most where parts are few and ranks wait."""
    choose = random.Random(seed)
    num_ranks = choose.randint(2, max_ranks)

    def call() -> Call:
        op = choose.choice((*OPS, NORM))
        if op == NORM:
            shape = choose.choice((1, 2, 5)), choose.choice((8, 24, 264))
            return Call(op, shape, choose.choice(FLOATS), choose.choice((1, 2, 3, 9)))
        rows = choose.choice((1, 2, 5))
        if op == "reduce_scatter":
            rows *= num_ranks
        return Call(
            op,
            (rows, choose.choice((1, 3, 8, 24, 65))),
            choose.choice((*FLOATS, torch.int64) if op == "all_gather" else FLOATS),
            choose.choice((1, 1, 2, 3, 9)),
            choose.choice((0, 0, 0, 1)),
        )

    calls = tuple(call() for _ in range(choose.choice((1, 3, 4))))
    return CollectiveCase(num_ranks, calls, multicast=choose.random() < 0.5)


def ring(group: Any, device: Any = "cpu", rounds: int = 3) -> list[list[float]]:
    """Every rank stores to the next one, signals, and waits for the one before."""
    seen = []
    with SymmetricMemory(group, 1 << 14, device=device) as memory:
        box = memory.empty((2, 3), torch.float32)
        words = memory.words(2)
        assert box.local.shape == (2, 3) and not box.local.any() and not words.local.any()
        memory.barrier()
        after, before = ((memory.rank + step) % memory.group_size for step in (1, -1))
        for number in range(rounds):
            box.peer(after).fill_(10.0 * memory.rank + number)
            words.signal(0, after)
            words.wait(0, before)
            seen.append(box.local.flatten().tolist())
            words.signal(1, before)  # it may store again
            words.wait(1, after)
        assert words.local.tolist() == [rounds, rounds]
    return seen


def verify_ring(results: Any, rounds: int = 3) -> None:
    for rank, seen in enumerate(results):
        before = (rank - 1) % len(results)
        assert seen == [[10.0 * before + number] * 6 for number in range(rounds)]


def run_on_gpu(group: Any, device: torch.device, case: CollectiveCase) -> list[Tensor]:
    return run_case(group, case, device=device, timeout_s=30)


def norms_on_gpus(num_ranks: int) -> CollectiveCase:
    calls = tuple(
        Call(NORM, shape, dtype, 16)
        for shape in ((1, 264), (5, 8192), (300, 1024))
        for dtype in FLOATS
    )
    return CollectiveCase(num_ranks, calls, staging_bytes=8 << 20)


def together(fn: Any, num_ranks: int = 2, return_errors: bool = False, **options: Any) -> list[Any]:
    """What ``fn(memory)`` returns, or raises with ``return_errors``, on each rank, a thread."""
    options = {"timeout_s": 20.0, "staging_bytes": 1 << 13, **options}

    def main(group: Any) -> Any:
        with SymmetricMemory(group, 1 << 12, device="cpu", **options) as memory:
            return fn(memory)

    return local.run(main, num_ranks, timeout_s=60, return_errors=return_errors)
