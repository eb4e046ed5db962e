"""Run a case on every rank, and check what came out against the reference, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import payload
import torch
from cases import Case, Inputs, make_inputs
from torch import Tensor

import deep_comm
from deep_comm import reference

# Whether a rank makes its inputs and leaves its results on its device, where they are checked.
_stays: ContextVar[bool] = ContextVar("stays", default=False)


@contextlib.contextmanager
def results_stay() -> Iterator[None]:
    """In it calls make inputs on their device, and what they return for a check stays there. For
    ranks that check in their own process: copies to the host and one thread of it take seconds
    where rows are many and long.
    """
    token = _stays.set(True)
    try:
        yield
    finally:
        _stays.reset(token)


def made_for(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where inputs are made: on the host, or on ``device`` in :func:`results_stay`."""
    return device if _stays.get() else contextlib.nullcontext()


@dataclass(frozen=True)
class Received:
    """What one rank got out of one call; tensors on the host, but see :func:`results_stay`."""

    recv_x: Tensor
    recv_scales: Tensor | None
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor
    counts: list[int]
    handle: dict[str, Tensor]
    cached_x: Tensor  # a second dispatch with the handle, payload of call + CACHED_CALL
    combined_x: Tensor
    combined_weights: Tensor


T = TypeVar("T")
Steps = Generator[None, None, T]
"""Calls of one rank, which stops between them; then their result."""


def completed(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


# The cached dispatch of a call carries a payload of its own, or a stale ring would look right.
CACHED_CALL = 512

HANDLE_FIELDS = (
    "rank_prefix_matrix",
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "recv_src_idx",
    "is_token_in_rank",
)
DEVICE_COUNTS = (
    "num_recv_tokens_tensor",
    "num_recv_tokens_per_rank",
    "num_recv_tokens_per_expert",
)


def config_of(case: Case) -> deep_comm.Config | None:
    if case.num_sms is None:
        return None
    return deep_comm.Config(case.num_sms, case.send_chunk, 2 * case.slots)


def num_channels_of(case: Case, received: Received) -> int:
    return received.handle["channel_prefix_matrix"].shape[1]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        # Strided scales must keep their strides on the way to a device.
        if value.device.type == device.type:
            return value
        _settle()
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    return value


def source_ranks(rank_prefix_matrix: Tensor, rank: int, num_rows: int) -> Tensor:
    """Source rank of every row that ``rank`` received (the last rank's past the end)."""
    ends = _to_host(rank_prefix_matrix[:, rank].long())
    return torch.searchsorted(ends, torch.arange(num_rows), right=True).clamp(max=len(ends) - 1)


def expert_outputs(
    case: Case, recv_src_rank: Tensor, recv_src_idx: Tensor, rank: int, call: int
) -> Tensor:
    return payload.summands(
        recv_src_rank, recv_src_idx, rank, case.hidden, case.combine_dtype, call
    )


def routing_arguments(
    buffer: deep_comm.Buffer, case: Case, topk_idx: Tensor, weights: Tensor, options: dict
) -> dict[str, Any]:
    """Of dispatch: with a layout, or with what it takes to make one."""
    arguments: dict[str, Any] = dict(topk_idx=topk_idx, topk_weights=weights)
    if case.fused_layout:
        return arguments | {"num_experts": case.experts}
    per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(
        topk_idx, case.experts, **options
    )
    _wait(event)
    return arguments | dict(
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
    )


def call_in_steps(
    buffer: deep_comm.Buffer,
    case: Case,
    call: int,
    device: torch.device,
    options: dict | None = None,
) -> Steps[Received]:
    """Layout, dispatch, cached dispatch, combine of one rank, with a stop after each call.
    ``options``: stream arguments.
    """
    rank = buffer.rank
    options = dict(options or {})
    with made_for(device):
        inputs = make_inputs(case, rank, call)
        second = payload.rows(rank, case.tokens[rank], case.hidden, case.dtype, call + CACHED_CALL)
    x, scales = _to(inputs.x, device), _to(inputs.scales, device)
    topk_idx, weights = _to(inputs.topk_idx, device), _to(inputs.topk_weights, device)
    config = config_of(case)
    arguments = routing_arguments(buffer, case, topk_idx, weights, options)
    payload_in = x if scales is None else (x, scales)
    recv, recv_topk_idx, recv_weights, counts, handle, event = buffer.dispatch(
        payload_in,
        **arguments,
        expert_alignment=case.alignment,
        num_worst_tokens=case.num_worst_tokens,
        zero_tail=case.zero_tail,
        config=config,
        **options,
    )
    _wait(event)
    yield
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)

    again = _to(second, device)
    cached, no_idx, no_weights, no_counts, no_handle, event = buffer.dispatch(
        again if scales is None else (again, scales), handle=handle, config=config, **options
    )
    _wait(event)
    yield
    assert (no_idx, no_weights, no_counts, no_handle) == (None, None, None, None)

    with made_for(device):
        src_rank = source_ranks(handle.rank_prefix_matrix, rank, recv_x.shape[0])
        outputs = expert_outputs(case, src_rank, _to_host(handle.recv_src_idx), rank, call)
    y = _to(outputs, device)
    combined_x, combined_weights, event = buffer.combine(
        y,
        handle,
        topk_weights=recv_weights,
        bias=_to(inputs.bias, device),
        config=config,
        **options,
    )
    _wait(event)
    yield
    return Received(
        recv_x=_to_host(recv_x),
        recv_scales=None if recv_scales is None else _to_host(recv_scales),
        recv_topk_idx=_to_host(recv_topk_idx),
        recv_topk_weights=_to_host(recv_weights),
        counts=list(counts),
        handle={name: _to_host(getattr(handle, name)) for name in HANDLE_FIELDS + DEVICE_COUNTS},
        cached_x=_to_host(cached[0] if isinstance(cached, tuple) else cached),
        combined_x=_to_host(combined_x),
        combined_weights=_to_host(combined_weights),
    )


def call_once(*given: Any) -> Received:
    """All steps at once; arguments as of call_in_steps."""
    return completed(call_in_steps(*given))


def _settle() -> None:
    """On CUDA, before a copy from or to ordinary host memory: the driver lets one such copy wait at
    a time, so that ranks that are threads would wait for each other's kernels.
    """
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """What neither a later call may change, nor a peer whose kernel has not ended yet."""
    if _stays.get() or tensor.device.type == "cpu":
        return tensor.clone()
    _settle()
    return tensor.cpu()


def _wait(event: deep_comm.EventOverlap) -> None:
    if event.event is not None:
        event.current_stream_wait()


def run_case(
    group: Any, case: Case, device: torch.device | str = "cpu", options: dict | None = None
) -> list[Received]:
    """All calls of a case on one rank."""
    with deep_comm.Buffer(
        group,
        case.nvl_bytes,
        device=device,
        timeout_s=60.0,
        num_direct_bytes=case.direct_bytes,
    ) as buffer:
        if case.smem_bytes is not None:
            buffer.runtime.smem_bytes_limit = case.smem_bytes
        return [call_once(buffer, case, call, buffer.device, options) for call in range(case.calls)]


def verify(case: Case, results: Sequence[Sequence[Received]]) -> None:
    """``results[rank][call]`` against the reference."""
    for call in range(case.calls):
        verify_call(case, [calls[call] for calls in results], call)


def verify_call(case: Case, received: Sequence[Received], call: int) -> None:
    inputs = [make_inputs(case, rank, call) for rank in range(case.num_ranks)]
    num_channels = next(num_channels_of(case, got) for got in received if got is not None)
    expected = _reference_dispatch(case, inputs, num_channels)
    for rank, (got, want) in enumerate(zip(received, expected, strict=True)):
        if got is None:  # an absent rank
            continue
        verify_dispatch(case, got, want, f"rank {rank} call {call}")
        payload.assert_same_bits(
            got.cached_x[: want.num_recv_tokens],
            cached_rows(case, want, call),
            f"rank {rank} call {call}: cached recv_x",
        )
    verify_combine(case, received, expected, inputs, call)


def cached_rows(case: Case, want: reference.Dispatched, call: int) -> Tensor:
    """What a rank receives in the cached dispatch of a call."""
    num = want.num_recv_tokens
    tokens, sources = want.recv_src_idx[:num].long(), want.recv_src_rank[:num]
    rows = [
        payload.rows(peer, num_tokens, case.hidden, case.dtype, call + CACHED_CALL).view(
            torch.uint8
        )[tokens[sources == peer]]  # torch cannot index every dtype
        for peer, num_tokens in enumerate(case.tokens)
    ]
    return torch.cat(rows).view(case.dtype)


def _reference_dispatch(
    case: Case, inputs: Sequence[Inputs], num_channels: int, num_worst_tokens: int | None = None
) -> list[reference.Dispatched]:
    return reference.dispatch(
        [i.x if i.scales is None else (i.x, i.scales) for i in inputs],
        [i.topk_idx for i in inputs],
        case.experts,
        [i.topk_weights for i in inputs],
        num_channels=num_channels,
        expert_alignment=case.alignment,
        num_worst_tokens=case.num_worst_tokens if num_worst_tokens is None else num_worst_tokens,
    )


def verify_dispatch(case: Case, got: Received, want: reference.Dispatched, who: str) -> None:
    verify_payload(case, got, want, who)
    verify_device_counts(case, got, want, who)
    for name in HANDLE_FIELDS:
        payload.assert_same_bits(got.handle[name], getattr(want, name), f"{who}: handle.{name}")


def verify_payload(case: Case, got: Any, want: reference.Dispatched, who: str) -> None:
    """What dispatch returned beside the handle."""
    same = payload.assert_same_bits
    num = want.num_recv_tokens
    assert got.recv_x.shape[0] == (case.num_worst_tokens or num), f"{who}: rows"
    same(got.recv_x[:num], want.recv_x[:num], f"{who}: recv_x")
    if want.recv_x_scales is not None:
        assert got.recv_scales is not None and got.recv_scales.is_contiguous()
        same(got.recv_scales[:num], want.recv_x_scales[:num], f"{who}: recv_x_scales")
    # Indices, weights and source indices are promised for the whole tensor, received or not.
    same(got.recv_topk_idx, want.recv_topk_idx, f"{who}: recv_topk_idx")
    same(got.recv_topk_weights, want.recv_topk_weights, f"{who}: recv_topk_weights")
    assert got.counts == want.num_recv_tokens_per_expert, f"{who}: {got.counts} tokens per expert"
    if case.zero_tail and case.num_worst_tokens:
        for tail in (
            got.recv_x[num:],
            got.recv_scales[num:] if got.recv_scales is not None else None,
        ):
            assert tail is None or not tail.view(torch.uint8).any(), f"{who}: the tail is not zero"


def verify_device_counts(case: Case, got: Received, want: reference.Dispatched, who: str) -> None:
    by_source = torch.bincount(want.recv_src_rank[: want.num_recv_tokens], minlength=case.num_ranks)
    assert got.handle["num_recv_tokens_tensor"].tolist() == [want.num_recv_tokens], who
    assert got.handle["num_recv_tokens_per_rank"].tolist() == by_source.tolist(), who
    idx = want.recv_topk_idx[: want.num_recv_tokens]
    per_expert = got.handle["num_recv_tokens_per_expert"]
    counted = torch.bincount(idx[idx >= 0].long(), minlength=len(per_expert))
    aligned = -(-counted // case.alignment) * case.alignment
    assert per_expert.tolist() == aligned.tolist(), who


def verify_combine(
    case: Case,
    received: Sequence[Received],
    expected: Sequence[reference.Dispatched],
    inputs: Sequence[Inputs],
    call: int,
) -> None:
    outputs = [
        expert_outputs(case, want.recv_src_rank.clamp(min=0), want.recv_src_idx, rank, call)
        for rank, want in enumerate(expected)
    ]
    combined = reference.combine(
        outputs,
        expected,
        [want.recv_topk_weights for want in expected],
        [i.bias for i in inputs],
    )
    for rank, (got, (want_x, want_weights)) in enumerate(zip(received, combined, strict=True)):
        if got is None:
            continue
        who = f"rank {rank} call {call}"
        payload.assert_same_bits(got.combined_x, want_x, f"{who}: combined_x")
        payload.assert_same_bits(got.combined_weights, want_weights, f"{who}: combined weights")
