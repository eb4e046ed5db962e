"""torch.ops.deep_comm.fused_*: torch's schemas, shapes for the compiler, gradients, routes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from deep_comm import errors, local, processes, tp
from deep_comm.symmetric import SymmetricMemory

pytestmark = pytest.mark.usefixtures("poison")

OPS = (
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fused_all_gather_scaled_matmul",
    "fused_scaled_matmul_reduce_scatter",
)
ops = torch.ops.deep_comm


def together(fn: Any, num_ranks: int = 2) -> list[Any]:
    """Ranks are threads of one process: each has a group of its own name."""

    def main(group: Any) -> Any:
        name = f"rank {group.rank()}"
        with SymmetricMemory(group, 0, staging_bytes=1 << 15, device="cpu") as memory:
            tp.register(name, memory)
            return fn(memory, name)

    return local.run(main, num_ranks, timeout_s=60)


def numbers(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, shape, generator=generator).double().float()


@pytest.mark.parametrize("op", OPS)
def test_schemas_are_torchs(op: str) -> None:
    own, torchs = (str(getattr(space, op).default._schema) for space in (ops, torch.ops.symm_mem))
    assert own.removeprefix("deep_comm::") == torchs.removeprefix("symm_mem::")


def test_a_group_without_memory_is_named() -> None:
    with pytest.raises(errors.UnsupportedError, match="'nobody'"):
        ops.fused_matmul_reduce_scatter(numbers(0, 2, 4), numbers(0, 4, 4), "sum", 0, "nobody")


def significant_strides(tensor: torch.Tensor) -> list[int | None]:
    """None where no element is found by it; compilers do not look at those."""
    matters = lambda extent: extent > 1 and tensor.numel() > 0
    return [
        stride if matters(extent) else None
        for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]


@pytest.mark.parametrize("shape", [(2, 4, 6), (1, 4, 6), (4, 1, 6), (0, 4, 6), (4, 6)])
@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
def test_shapes_and_strides_for_the_compiler_are_those_of_the_results(
    dim: int, shape: tuple[int, ...]
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if dim == len(shape):
        return
    is_last = dim % len(shape) == len(shape) - 1
    has_parts = is_last or shape[dim] % 2 == 0
    fp8 = torch.float8_e4m3fn

    def fn(memory: SymmetricMemory, name: str) -> list[Any]:
        depth = 12 if is_last else 6
        x, weights = numbers(memory.rank, *shape), [numbers(9, depth, 4), numbers(8, depth, 2)]
        scale = torch.ones(())
        gathers = [
            lambda x, weights: ops.fused_all_gather_matmul(x, weights, dim, name),
            lambda x, weights: ops.fused_all_gather_matmul(x, weights, dim, name, return_A=False),
            lambda x, weights: ops.fused_all_gather_matmul(
                x.mT.contiguous().mT, weights, dim, name
            ),
        ]
        scaled = [
            lambda x, weights: ops.fused_all_gather_scaled_matmul(
                x.to(fp8), [each.to(fp8) for each in weights], scale, [scale] * 2, dim, name,
                [None] * 2, [None] * 2, [torch.bfloat16] * 2, [False] * 2,
            ),
        ]  # fmt: skip
        scatters = [
            lambda x, weights: ops.fused_matmul_reduce_scatter(
                x, weights[0][:6], "sum", dim, name
            ),
            lambda x, weights: ops.fused_scaled_matmul_reduce_scatter(
                x.to(fp8), weights[0][:6].to(fp8), scale, scale, "sum", dim, dim, name, None,
                None, None, torch.bfloat16,
            ),
        ]  # fmt: skip
        calls = [*gathers, *(scaled * (not is_last)), *(scatters * has_parts)]
        real = [call(x, weights) for call in calls]
        fake_mode = FakeTensorMode()
        scale = fake_mode.from_tensor(scale)
        with fake_mode:
            fake = [
                call(fake_mode.from_tensor(x), [fake_mode.from_tensor(each) for each in weights])
                for call in calls
            ]
        layout = lambda results: torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda each: (each.shape, significant_strides(each), each.dtype), results
        )
        return [layout(real), layout(fake)]

    (real, fake), _ = together(fn)
    assert real == fake


@pytest.mark.parametrize("used", [{0}, {1}, {2}, {0, 2}, {1, 2}])
def test_results_that_a_loss_does_not_use_have_gradients_of_zero(used: set[int]) -> None:
    """0: what was gathered; 1 and 2: the products."""

    def fn(memory: SymmetricMemory, name: str) -> list[torch.Tensor]:
        x = numbers(memory.rank, 2, 6).requires_grad_()
        weights = [numbers(10, 6, 4).requires_grad_(), numbers(20, 6, 3).requires_grad_()]
        gathered, outs = ops.fused_all_gather_matmul(x, weights, 0, name)
        sum((gathered, *outs)[each].sum() for each in used).backward()
        return [x.grad, *(each.grad for each in weights)]

    xs = torch.cat([numbers(rank, 2, 6) for rank in range(2)]).requires_grad_()
    weights = [numbers(10, 6, 4).requires_grad_(), numbers(20, 6, 3).requires_grad_()]
    loss = sum((xs, xs @ weights[0], xs @ weights[1])[each].sum() for each in used)
    loss.backward()
    for rank, grads in enumerate(together(fn)):
        assert torch.equal(grads[0], 2 * xs.grad[2 * rank : 2 * rank + 2])  # of both ranks' losses
        for got, weight in zip(grads[1:], weights, strict=True):
            wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert torch.equal(torch.zeros_like(weight) if got is None else got, wanted)


def test_gradients_are_those_of_the_whole_computation() -> None:
    """Sequence parallelism: a product of gathered rows, then one whose sum is scattered."""

    def fn(memory: SymmetricMemory, name: str) -> list[torch.Tensor]:
        rank = memory.rank
        x = numbers(rank, 2, 6).requires_grad_()
        first = [numbers(10 + rank, 6, 4).requires_grad_(), numbers(20 + rank, 6, 4)]
        first[1].requires_grad_()
        second = numbers(30 + rank, 4, 6).requires_grad_()
        gathered, outs = ops.fused_all_gather_matmul(x, first, 0, name)
        hidden = outs[0] * outs[1]
        out = ops.fused_matmul_reduce_scatter(hidden, second, "avg", 0, name)
        loss = (out * numbers(40 + rank, 2, 6)).sum() + (gathered[:2] * (rank + 1)).sum()
        loss.backward()
        return [x.grad, first[0].grad, first[1].grad, second.grad]

    results = together(fn)
    xs = [numbers(rank, 2, 6).requires_grad_() for rank in range(2)]
    firsts = [
        [numbers(start + rank, 6, 4).requires_grad_() for start in (10, 20)] for rank in (0, 1)
    ]
    seconds = [numbers(30 + rank, 4, 6).requires_grad_() for rank in range(2)]
    whole = torch.cat(xs)
    total = sum(
        ((whole @ a) * (whole @ b)) @ second for (a, b), second in zip(firsts, seconds, strict=True)
    )
    loss = sum(
        ((total / 2).chunk(2)[rank] * numbers(40 + rank, 2, 6)).sum()
        + (whole[:2] * (rank + 1)).sum()
        for rank in range(2)
    )
    loss.backward()
    for rank, grads in enumerate(results):
        wanted = [xs[rank].grad, firsts[rank][0].grad, firsts[rank][1].grad, seconds[rank].grad]
        for got, right in zip(grads, wanted, strict=True):
            assert torch.equal(got, right), rank


def test_compiled_ops_have_the_gradients_of_eager_ones() -> None:
    def fn(memory: SymmetricMemory, name: str) -> None:
        x, w = numbers(0, 4, 8).requires_grad_(), numbers(1, 8, 6).requires_grad_()
        product = lambda x, w: ops.fused_all_gather_matmul(x, [w], 0, name)[1][0].square().sum()
        compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
        for got, wanted in zip(
            torch.autograd.grad(compiled(x, w), (x, w)),
            torch.autograd.grad(product(x, w), (x, w)),
            strict=True,
        ):
            assert torch.equal(got, wanted)

    together(fn, 1)


def test_gradients_have_gradients() -> None:
    def fn(memory: SymmetricMemory, name: str) -> None:
        x, w = numbers(0, 4, 8).requires_grad_(), numbers(1, 8, 6).requires_grad_()
        second = []
        for product in (x @ w, ops.fused_all_gather_matmul(x, [w], 0, name)[1][0]):
            (of_w,) = torch.autograd.grad(product.square().sum(), w, create_graph=True)
            second += torch.autograd.grad(of_w.square().sum(), x)
        assert torch.equal(*second)

    together(fn, 1)


def test_what_was_gathered_alone_has_gradients() -> None:
    def fn(memory: SymmetricMemory, name: str) -> torch.Tensor:
        x = numbers(memory.rank, 2, 4).requires_grad_()
        gathered, _ = ops.fused_all_gather_matmul(x, [], 0, name)
        (of_x,) = torch.autograd.grad((gathered * numbers(7, 4, 4)).sum(), x)
        return of_x

    wanted = 2 * numbers(7, 4, 4)
    assert torch.equal(torch.cat(together(fn)), wanted)


def test_gradients_of_what_was_gathered_along_the_last_dim() -> None:
    def fn(memory: SymmetricMemory, name: str) -> torch.Tensor:
        x = numbers(memory.rank, 4, 8).requires_grad_()
        gathered, outs = ops.fused_all_gather_matmul(x, [numbers(10, 16, 4)], 1, name)
        ((gathered * numbers(20, 4, 16)).sum() + outs[0].sum()).backward()
        return x.grad

    wanted = 2 * (numbers(20, 4, 16) + numbers(10, 16, 4).sum(1))  # both ranks have the same loss
    for rank, grad in enumerate(together(fn)):
        assert torch.equal(grad, wanted[:, 8 * rank : 8 * rank + 8])


def test_scaled_ops_take_torchs_forms() -> None:
    fp8 = torch.float8_e4m3fn

    def fn(memory: SymmetricMemory, name: str) -> None:
        xs = [numbers(rank, 2, 3, 16) for rank in range(2)]
        scales = [2.0 ** numbers(50 + rank, 2, 3, 1) for rank in range(2)]
        weight, weight_scale = numbers(7, 16, 8), 2.0 ** numbers(8, 1, 8)
        whole = torch.cat(xs, 1) * torch.cat(scales, 1)
        wanted = whole @ (weight * weight_scale)
        for scale in (scales[memory.rank], torch.cat(scales, 1)):  # sharded, replicated
            gathered, (out,) = ops.fused_all_gather_scaled_matmul(
                xs[memory.rank].to(fp8), [weight.to(fp8)], scale, [weight_scale], 1, name,
                [None], [None], [torch.float32], [True],
            )  # fmt: skip
            assert torch.equal(gathered.float(), torch.cat(xs, 1))
            assert torch.equal(out, wanted)
        own = [x.flatten(0, 1) * scale.flatten(0, 1) for x, scale in zip(xs, scales, strict=True)]
        total = sum(part @ (weight * weight_scale) for part in own).view(2, 3, 8)
        part = ops.fused_scaled_matmul_reduce_scatter(
            xs[memory.rank].flatten(0, 1).to(fp8), weight.to(fp8),
            scales[memory.rank].flatten(0, 1), weight_scale, "sum", 0, 0, name, [2, 3, 8],
            None, None, torch.float32,
        )  # fmt: skip
        assert torch.equal(part, total.chunk(2)[memory.rank])
        with pytest.raises(errors.UnsupportedArgument, match="bias or result_scale"):
            ops.fused_scaled_matmul_reduce_scatter(
                xs[0].flatten(0, 1).to(fp8), weight.to(fp8), scales[0].flatten(0, 1),
                weight_scale, "sum", 0, 0, name, [2, 3, 8], torch.ones(8), None, torch.float32,
            )  # fmt: skip

    together(fn)


def _installed(group: Any) -> str:
    """A process: torch's ops of the group come here, before and after compilation."""
    rank, num_ranks = group.rank(), group.size()
    x, weight = numbers(rank, 2, 6), numbers(9, 6, 4)
    whole = torch.cat([numbers(each, 2, 6) for each in range(num_ranks)])
    with SymmetricMemory(group, 0, staging_bytes=1 << 15, device="cpu") as memory:
        tp.install(group, memory)
        name = group.group_name

        def call(x: torch.Tensor, weight: torch.Tensor) -> Any:
            gathered, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, name)
            part = torch.ops.symm_mem.fused_matmul_reduce_scatter(  # by name, as vLLM 0.19 does
                out, weight.t(), "sum", scatter_dim=0, group_name=name
            )
            return gathered, out, part

        for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            gathered, out, part = run(x, weight)
            assert torch.equal(gathered, whole) and torch.equal(out, whole @ weight)
            total = num_ranks * (whole @ weight @ weight.t())
            assert torch.equal(part, total.chunk(num_ranks)[rank])
        own = torch.compile(
            lambda x, weight: ops.fused_all_gather_matmul(x, [weight], 0, name)[1][0],
            backend="aot_eager",
            fullgraph=True,
        )
        assert torch.equal(own(x, weight), whole @ weight)
    return "done"


def _compiled_by_inductor(group: Any) -> list[str]:
    """A process: a model of collectives and products, and what inductor has made of it."""
    import torch.distributed._functional_collectives as collectives

    from deep_comm.tp import torch_ops

    called = []

    def noted(name: str) -> Any:
        own = getattr(torch_ops, name)

        def call(*given: Any, **more: Any) -> Any:
            called.append(name)
            return own(*given, **more)

        return mock.patch.object(torch_ops, name, call)

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = (collectives.all_gather_tensor(x, 0, group) @ up).relu()
        return collectives.reduce_scatter_tensor(hidden @ down, "sum", 0, group)

    x, up, down = numbers(group.rank(), 8, 64), numbers(9, 64, 32), numbers(8, 32, 64)
    wanted = block(x, up, down)
    options = dict(_micro_pipeline_tp=True, reorder_for_compute_comm_overlap=False)
    with (
        SymmetricMemory(group, 0, staging_bytes=1 << 17, device="cpu") as memory,
        mock.patch.object(torch.distributed, "is_nccl_available", lambda: True),
        torch._inductor.config.patch(options), noted("all_gather_matmul"),
        noted("matmul_reduce_scatter"),
    ):  # fmt: skip
        tp.install(group, memory)
        for _ in range(2):
            assert torch.equal(torch.compile(block, fullgraph=True)(x, up, down), wanted)
    return called


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_inductors_asynchronous_tensor_parallelism_comes_here() -> None:
    """Its pass looks for NCCL, which builds for the host lack."""
    fused = ["all_gather_matmul", "matmul_reduce_scatter"]
    assert processes.run(_compiled_by_inductor, 2) == [2 * fused] * 2


def _registered_with_a_memory_of_one_rank(group: Any) -> str:
    import torch.distributed as dist

    alone_groups = [dist.new_group([rank]) for rank in range(2)]
    with SymmetricMemory(alone_groups[group.rank()], 0, device="cpu") as alone:
        with pytest.raises(errors.ArgumentError, match="must be of the group's ranks"):
            tp.register(dist.group.WORLD, alone)
    return "done"


def test_a_memory_of_other_ranks_is_refused() -> None:
    assert processes.run(_registered_with_a_memory_of_one_rank, 2) == ["done"] * 2


def test_torchs_ops_of_an_installed_group_come_here() -> None:
    assert processes.run(_installed, 2) == ["done"] * 2
