"""What tests of calls made in one native step share: groups, inputs, spies that say which were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import deep_comm
from deep_comm import local

R, T, M, H, K, E = 2, 7, 9, 256, 3, 6

# Forms of dispatches that cast rows on their way.
CASTS: dict[str, dict[str, bool]] = {
    "cast": dict(use_fp8=True),
    "cast-ue8m0": dict(use_fp8=True, round_scale=True, use_ue8m0=True),
}


def on_ranks(body: Callable[[Any, int], Any], num_ranks: int = R, **options: Any) -> list[Any]:
    def main(group: local.ThreadGroup) -> Any:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, num_ranks, E)
        with deep_comm.Buffer(
            group, 0, num_bytes, low_latency_mode=True, timeout_s=20, **options
        ) as buffer:
            return body(buffer, group.rank())

    return local.run(main, num_ranks, timeout_s=120)


def inputs(rank: int, num_tokens: int = T, idx_dtype: torch.dtype = torch.int64) -> Any:
    generator = torch.Generator().manual_seed(17 + rank)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices.to(idx_dtype)
    if num_tokens > 2:
        idx[2, 1] = -1
    return x, idx, torch.rand(num_tokens, K, generator=generator)


def form_of(form: str, rank: int, num_tokens: int) -> tuple[Any, dict[str, Any]]:
    """What a dispatch is given: its rows, and routing with what else the form is about, one of
    CASTS or "bf16", "fp8", "without-weights", "int32", "aligned"."""
    idx_dtype = torch.int32 if form == "int32" else torch.int64
    x, idx, weights = inputs(rank, num_tokens, idx_dtype)
    options: dict[str, Any] = dict(topk_idx=idx, num_experts=E, **CASTS.get(form, {}))
    if form != "without-weights":
        options["topk_weights"] = weights
    if form == "aligned":
        options["expert_alignment"] = 4
    if form != "fp8":
        return x, options
    scales = torch.rand(len(x), 2, generator=torch.Generator().manual_seed(5))
    return (x.to(torch.float8_e4m3fn), scales), options


def layout_of(buffer: Any, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """What dispatch takes of a layout."""
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(idx, E)
    given = dict(
        num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=mask
    )
    return given if per_node is None else {**given, "num_tokens_per_rdma_rank": per_node}


class Marked(torch.Tensor):
    """A subclass may mean anything."""


def on_normal(body: Callable[[Any, int], Any], num_ranks: int = R, **options: Any) -> None:
    def main(group: local.ThreadGroup) -> Any:
        with deep_comm.Buffer(group, 8 << 20, timeout_s=20, **options) as buffer:
            return body(buffer, group.rank())

    local.run(main, num_ranks, timeout_s=120)


class NormalSpy:
    """Which calls of a Buffer were made in one step; ``is_off``: none may be."""

    def __init__(self, buffer: Any) -> None:
        self.made: list[bool] = []
        self.is_off = False
        for name in ("dispatch", "new_dispatch", "combine"):
            name = f"_quick_{name}"
            setattr(buffer, name, self._spied(getattr(buffer, name)))
        buffer._context.quick_layout = self._spied(buffer._context.quick_layout)

    def _spied(self, quick_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = None if self.is_off else quick_call(*arguments)
            self.made.append(result is not None)
            return result

        return call


def to_rank(rank: int, num_tokens: int) -> dict[str, Any]:
    """All tokens to one expert of ``rank``."""
    x = torch.arange(num_tokens * H).view(num_tokens, H).bfloat16()
    idx = torch.full((num_tokens, K), -1)
    idx[:, 0] = rank * (E // R)
    return dict(x=x, topk_idx=idx, topk_weights=torch.ones(num_tokens, K), num_experts=E)


def require_same_dispatch(one: list[Any], many: list[Any]) -> None:
    """Of what an ``everything`` says of dispatches."""
    for number, (got, want) in enumerate(zip(one, many, strict=True)):
        if not isinstance(want, torch.Tensor):
            assert got == want and type(got) is type(want), number
            continue
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(got.float(), want.float()), number


def wrong_guess(
    buffer: Any,
    rank: int,
    most: int,
    launches_of: tuple[int, int],
    everything: Callable[[tuple[Any, ...]], list[Any]],
    **options: Any,
) -> None:
    """Rank 1 has one token and gets ``most`` more: nobody could tell it before.

    Args:
        launches_of: a dispatch whose rows could not leave at once, and one as it should be.
        everything: of what a dispatch returned, to be compared.
        options: of dispatches.
    """
    engine, free = buffer.runtime, buffer._context.region.num_free_bytes
    buffer.dispatch(**to_rank(1, 1), **options)
    spy = NormalSpy(buffer)
    # Notify, what numbers rows, a dispatch that left at once, the one that moved, what places rows.
    for launches in launches_of:
        before = engine.num_launches
        arguments = to_rank(1, most if rank == 0 else 1)
        received = buffer.dispatch(**arguments, **options)
        assert engine.num_launches - before == launches
        assert spy.made == [True]
        got = everything(received)
        assert len(received[0]) == (most + 1 if rank == 1 else 0)
        if rank == 1:
            assert torch.equal(received[0][:most], to_rank(1, most)["x"])
        assert received[3] == [most + 1 if rank == 1 else 0, 0, 0]
        assert received[4].num_recv_tokens == len(received[0])
        assert received[4].max_num_tokens == most
        again = buffer.dispatch(arguments["x"], handle=received[4])[0]
        assert torch.equal(again, received[0])
        assert torch.equal(buffer.combine(again, received[4])[0], arguments["x"])
        spy.is_off = True
        require_same_dispatch(got, everything(buffer.dispatch(**arguments, **options)))
        spy.is_off = False
        spy.made.clear()
        del received, got, again
    assert buffer._context.region.num_free_bytes == free
