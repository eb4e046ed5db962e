"""Expanded dispatches and combines of a case, of one tier or two, against the reference, bit for
bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import payload
import pytest
import roundtrip
import torch
from cases import Case, InternodeCase, make_inputs
from roundtrip import (
    CACHED_CALL,
    Given,
    Steps,
    _to,
    _wait,
    bytes_since,
    combined_by_reference,
    completed,
    dispatched_by_reference,
    made_for,
    parts_of,
    rail_bytes,
    routing_arguments,
    run_calls,
    same_if_any,
)
from roundtrip import _to_host as _view_on_host
from torch import Tensor

import deep_comm
from deep_comm import reference
from deep_comm.errors import ArgumentError, HandleMismatch
from deep_comm.ranks.topology import num_local_experts


@dataclass(frozen=True)
class ReceivedExpanded:
    """What one rank got out of one call; tensors on the host, but see roundtrip.results_stay."""

    recv_x: Tensor
    recv_scales: Tensor | None
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor | None
    counts: list[int]
    expert_offsets: Tensor
    expert_counts: Tensor
    recv_rows: Tensor
    recv_src_idx: Tensor
    cached_x: Tensor
    cached_scales: Tensor | None
    combined_x: Tensor  # rows as they are, weights sent back
    combined_weights: Tensor | None
    weighted_x: Tensor | None  # rows times weights
    cached_bytes: list[list[int]]  # that the cached dispatch has put on the rail


def _to_host(tensor: Tensor) -> Tensor:
    """A copy: parts of no rows share an address, which torch.save refuses."""
    return _view_on_host(tensor).clone()


def _to_host_if(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _to_host(tensor)


def num_local(case: Case, rank: int) -> int:
    return num_local_experts(rank, case.experts, case.num_ranks)


def worst_rows(case: Case) -> int:
    """num_worst_tokens that always suffices, plus what the case adds; 0 without it."""
    if not case.worst:
        return 0
    padding = max(num_local(case, rank) for rank in range(case.num_ranks)) * (case.alignment - 1)
    return sum(case.tokens) * case.topk + padding + case.worst


def outputs_of(case: Case, rank: int, num_rows: int, call: int) -> Tensor:
    """What a rank's experts return for its rows; order-sensitive columns included."""
    # Neighbouring rows of a token cancel only in the right order: alternate the sign by row.
    outputs = torch.empty(num_rows, case.hidden, dtype=case.combine_dtype)
    for parity in (0, 1):
        rows = torch.arange(num_rows)[parity::2]
        outputs[parity::2] = payload.summands(
            rows % 7, rows, rank + parity, case.hidden, case.combine_dtype, call
        )
    return outputs


def call_in_steps(
    buffer: deep_comm.Buffer, case: Case, call: int, options: dict | None = None
) -> Steps[ReceivedExpanded]:
    config = case.config()
    options = dict(options or {})
    given = Given.to(buffer, case, call)
    recv, recv_topk_idx, recv_weights, counts, handle, event = buffer.dispatch(
        given.x, **routing_arguments(buffer, case, given, options), expert_alignment=case.alignment,
        num_worst_tokens=worst_rows(case), config=config, expand=True,
        zero_padding=case.seed % 2 == 0, **options,
    )  # fmt: skip
    _wait(event)
    yield
    recv_x, recv_scales = parts_of(recv)
    expansion = handle.expansion
    assert expansion.num_rows == handle.num_output_rows == len(recv_x)
    assert expansion.expert_alignment == case.alignment
    assert (handle.num_recv_tokens is None) == bool(case.worst)
    assert (event.event is not None) == bool(options.get("async_finish"))
    before = rail_bytes(buffer)
    cached, *nothing, event = buffer.dispatch(
        given.again, handle=handle, config=config, zero_padding=True, **options
    )
    _wait(event)
    assert nothing == [None, None, None, None]
    cached_bytes = bytes_since(before, buffer)
    yield
    cached_x, cached_scales = parts_of(cached)
    with made_for(buffer.device):
        outputs = outputs_of(case, buffer.rank, recv_x.shape[0], call)
    y, bias = _to(outputs, buffer.device), given.bias
    combined_x, combined_weights, event = buffer.combine(
        y, handle, topk_weights=recv_weights, bias=bias, config=config, **options
    )
    _wait(event)
    yield
    weighted_x = None
    if recv_weights is not None:
        weighted_x, no_weights, event = buffer.combine(
            y, handle, topk_weights=recv_weights, bias=bias, config=config, apply_weights=True,
            **options,
        )  # fmt: skip
        _wait(event)
        assert no_weights is None
    yield
    return ReceivedExpanded(
        recv_x=_to_host(recv_x), recv_scales=_to_host_if(recv_scales),
        recv_topk_idx=_to_host(recv_topk_idx), recv_topk_weights=_to_host_if(recv_weights),
        counts=list(counts), expert_offsets=_to_host(expansion.expert_offsets),
        expert_counts=_to_host(expansion.expert_counts), recv_rows=_to_host(expansion.recv_rows),
        recv_src_idx=_to_host(handle.recv_src_idx), cached_x=_to_host(cached_x),
        cached_scales=_to_host_if(cached_scales), combined_x=_to_host(combined_x),
        combined_weights=_to_host_if(combined_weights), weighted_x=_to_host_if(weighted_x),
        cached_bytes=cached_bytes,
    )  # fmt: skip


def call_once(*given: Any) -> ReceivedExpanded:
    """All steps at once; arguments as of call_in_steps."""
    return completed(call_in_steps(*given))


def run_case(
    group: Any, case: Case, device: torch.device | str = "cpu", options: dict | None = None
) -> list[ReceivedExpanded]:
    """All calls of a case on one rank."""
    one = lambda buffer, call: call_once(buffer, case, call, options)
    return run_calls(group, case, device, one)


def verify(case: Case, results: Sequence[Sequence[ReceivedExpanded]]) -> None:
    """``results[rank][call]`` against the reference."""
    for call in range(case.calls):
        _verify_call(case, [calls[call] for calls in results], call)


check = functools.partial(roundtrip.check, run_case=run_case, verify=verify)
check_processes = functools.partial(roundtrip.check_processes, run_case=run_case, verify=verify)


def _expanded(case: Case, received: Sequence[reference.Dispatched]) -> list[reference.Expanded]:
    return [
        reference.expand(one, num_local(case, rank), case.alignment, worst_rows(case))
        for rank, one in enumerate(received)
    ]


def _verify_call(case: Case, results: Sequence[ReceivedExpanded], call: int) -> None:
    same = payload.assert_same_bits
    inputs = [make_inputs(case, rank, call) for rank in range(case.num_ranks)]
    worst = worst_rows(case)
    crossed = dispatched_by_reference(case, inputs, num_worst_tokens=worst)
    plain = [one.received if isinstance(case, InternodeCase) else one for one in crossed]
    again = [
        payload.rows(rank, num_tokens, case.hidden, case.dtype, call + CACHED_CALL)
        for rank, num_tokens in enumerate(case.tokens)
    ]
    repeated = reference.dispatch(
        [x if i.scales is None else (x, i.scales) for x, i in zip(again, inputs, strict=True)],
        [i.topk_idx for i in inputs],
        case.experts,
        num_worst_tokens=worst,
    )
    wanted, wanted_again = _expanded(case, plain), _expanded(case, repeated)
    for rank, (got, want, want_again) in enumerate(zip(results, wanted, wanted_again, strict=True)):
        if got is None:  # an absent rank
            continue
        who = f"rank {rank} call {call}"
        offsets = [] if case.worst else want.expert_offsets.diff().tolist()
        assert got.counts == offsets, f"{who}: counts {got.counts}"
        for name in ("expert_offsets", "expert_counts", "recv_rows"):
            same(getattr(got, name), getattr(want, name), f"{who}: {name}")
        same(got.recv_src_idx, plain[rank].recv_src_idx, f"{who}: recv_src_idx")
        same(got.recv_topk_idx, want.recv_topk_idx, f"{who}: recv_topk_idx")
        same_if_any(got.recv_topk_weights, want.recv_topk_weights, f"{who}: recv_topk_weights")
        # Rows of no token are promised with zero_padding alone.
        is_row = want.recv_topk_idx >= 0
        mask = slice(None) if case.seed % 2 == 0 else is_row
        assert got.recv_x.shape == want.recv_x.shape, f"{who}: {tuple(got.recv_x.shape)}"
        same(_rows(got.recv_x, mask), _rows(want.recv_x, mask), f"{who}: recv_x")
        same(_rows(got.cached_x), _rows(want_again.recv_x), f"{who}: cached recv_x")
        if want.recv_x_scales is not None and want_again.recv_x_scales is not None:
            assert got.recv_scales is not None and got.cached_scales is not None
            same(_rows(got.recv_scales, mask), _rows(want.recv_x_scales, mask), f"{who}: scales")
            same(_rows(got.cached_scales), _rows(want_again.recv_x_scales), f"{who}: cached scales")
    outputs = [outputs_of(case, rank, one.recv_x.shape[0], call) for rank, one in enumerate(wanted)]
    weights = [one.recv_topk_weights for one in wanted]
    biases = [i.bias for i in inputs]
    combined = combined_by_reference(
        case,
        [reference.reduce_experts(y, one) for y, one in zip(outputs, wanted, strict=True)],
        crossed,
        [reference.selection_weights(w, one) for w, one in zip(weights, wanted, strict=True)]
        if case.has_weights
        else None,
        biases,
    )
    weighted = combined_by_reference(
        case,
        [
            reference.reduce_experts(y, one, w)
            for y, one, w in zip(outputs, wanted, weights, strict=True)
        ],
        crossed,
        None,
        biases,
    )
    for rank, got in enumerate(results):
        if got is None:
            continue
        who = f"rank {rank} call {call}"
        same(got.combined_x, combined[rank][0], f"{who}: combined_x")
        same_if_any(got.combined_weights, combined[rank][1], f"{who}: combined weights")
        if got.weighted_x is not None:
            same(got.weighted_x, weighted[rank][0], f"{who}: combined_x with weights")
        if isinstance(case, InternodeCase):  # a row crosses once, however many experts it has
            roundtrip.verify_bytes(case, got.cached_bytes, crossed[rank], rank)


def _rows(tensor: Tensor, mask: Any = slice(None)) -> Tensor:
    """As bytes: torch cannot index every dtype."""
    width = tensor.shape[1] * tensor.element_size()
    # Not contiguous(): it keeps odd strides of dimensions of extent 1, which a view then refuses.
    rows = tensor.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8).view(tensor.shape[0], width)[mask]


def dispatch_ones(
    buffer: deep_comm.Buffer, num_tokens: int, alignment: int, **options: Any
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Every token to two of four experts, by turns."""
    idx = torch.arange(num_tokens * 2).view(num_tokens, 2) % 4
    x = torch.ones(num_tokens, 64, dtype=torch.bfloat16)
    return buffer.dispatch(
        x, topk_idx=idx, num_experts=4, expert_alignment=alignment, expand=True, **options
    )


def check_refusals(buffer: deep_comm.Buffer, num_rows: int) -> None:
    """What expanded calls refuse before anything is launched, on one tier and on two.

    Args:
        num_rows: of dispatch_ones(buffer, 4, 8).
    """
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    idx = torch.zeros(4, 1, dtype=torch.int64)
    layout = buffer.get_dispatch_layout(idx, 2)
    given = dict(
        num_tokens_per_rank=layout[0],
        num_tokens_per_expert=layout[2],
        is_token_in_rank=layout[3],
    )
    expanded_handle = dispatch_ones(buffer, 4, 8)[4]
    plain_x, *_, plain_handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=2)
    before = buffer.runtime.num_launches
    with pytest.raises(ArgumentError, match="topk_idx"):
        buffer.dispatch(x, **given, expand=True)
    with pytest.raises(ArgumentError, match="zero_padding"):
        buffer.dispatch(x, topk_idx=idx, num_experts=2, zero_padding=True)
    with pytest.raises(HandleMismatch, match="expand=True"):
        buffer.dispatch(x, handle=plain_handle, expand=True)
    with pytest.raises(HandleMismatch, match="apply_weights"):
        weights = torch.ones(len(plain_x), 1)
        buffer.combine(plain_x, plain_handle, weights, apply_weights=True)
    with pytest.raises(HandleMismatch, match=f"{num_rows} received rows"):
        buffer.combine(x, expanded_handle)
    y = torch.ones(num_rows, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="topk_weights"):
        buffer.combine(y, expanded_handle, apply_weights=True)
    with pytest.raises(ArgumentError, match="topk_weights"):
        buffer.combine(y, expanded_handle, torch.ones(num_rows, 1), apply_weights=True)
    assert buffer.runtime.num_launches == before
