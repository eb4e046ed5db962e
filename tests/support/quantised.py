"""Dispatches that quantise on the way, of one tier or two, against the reference's cast and a
dispatch of what it gives, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import payload
import roundtrip
import torch
from cases import Case, InternodeCase, Scales, here, make_inputs
from expanded import _rows, _to_host, num_local, worst_rows
from roundtrip import (
    CACHED_CALL,
    Steps,
    _to,
    _wait,
    bytes_since,
    completed,
    dispatched_by_reference,
    made_for,
    rail_bytes,
    run_calls,
)
from torch import Tensor

import deep_comm
from deep_comm import reference
from deep_comm.reference.low_latency import pack_ue8m0, quantise


@dataclass(frozen=True)
class Form:
    """What a case asks of dispatch beside its own options."""

    round_scale: bool = False
    use_ue8m0: bool = False
    column_major: bool = False
    expand: bool = False


class Formed(NamedTuple):
    """A case, and what it asks for."""

    case: Case
    form: Form

    @property
    def num_ranks(self) -> int:
        return self.case.num_ranks


FORMS = [
    Form(), Form(round_scale=True), Form(round_scale=True, use_ue8m0=True), Form(column_major=True),
    Form(round_scale=True, use_ue8m0=True, column_major=True, expand=True), Form(expand=True),
]  # fmt: skip


@dataclass(frozen=True)
class ReceivedFp8:
    """What one rank got out of one call, cached and not; tensors on the host, but see
    roundtrip.results_stay."""

    recv_x: tuple[Tensor, Tensor]
    scale_strides: list[tuple[int, ...]]
    scales: tuple[Tensor, Tensor]
    recv_topk_idx: Tensor
    recv_src_idx: Tensor
    cached_bytes: list[list[int]]  # that the cached dispatch has put on the rail


def rows_of(case: Case, rank: int, call: int) -> Tensor:
    """Values of all magnitudes, some blocks of zeros, some with one large element; on torch's
    default device."""
    with torch.device("cpu"):
        seed = (case.seed * 64 + rank) * 4096 + call
        rows = _drawn(seed, case.tokens[rank], case.hidden)
    return here(rows)


@functools.lru_cache(maxsize=32)  # forms share a case, and every rank checks with all ranks' rows
def _drawn(seed: int, num_tokens: int, hidden: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, hidden // 128, 128)
    values = torch.randn(shape, generator=generator)
    scale = torch.randint(-24, 24, shape[:2], generator=generator)
    values = torch.ldexp(values, scale.unsqueeze(2))
    values[torch.rand(shape[:2], generator=generator) < 0.1] = 0.0
    values[..., 5] *= torch.where(torch.rand(shape[:2], generator=generator) < 0.2, 512.0, 1.0)
    return values.view(num_tokens, hidden).to(torch.bfloat16)


def call_in_steps(
    buffer: deep_comm.Buffer, formed: Formed, call: int, options: dict | None = None
) -> Steps[ReceivedFp8]:
    case, form = formed
    rank, device = buffer.rank, buffer.device
    options = dict(options or {})
    with made_for(device):
        inputs = make_inputs(case, rank, call)
        rows = [rows_of(case, rank, number) for number in (call, call + CACHED_CALL)]
    options.update(
        config=case.config(), use_fp8=True, round_scale=form.round_scale, use_ue8m0=form.use_ue8m0,
        column_major_scales=form.column_major,
    )  # fmt: skip
    first, recv_topk_idx, _, _, handle, event = buffer.dispatch(
        _to(rows[0], device), topk_idx=_to(inputs.topk_idx, device),
        topk_weights=_to(inputs.topk_weights, device), num_experts=case.experts,
        expert_alignment=case.alignment, num_worst_tokens=worst_rows(case), expand=form.expand,
        **options,
    )  # fmt: skip
    _wait(event)
    yield
    before = rail_bytes(buffer)
    again = _to(rows[1], device)
    second, *_, event = buffer.dispatch(again, handle=handle, **options)
    _wait(event)
    return ReceivedFp8(
        recv_x=(_to_host(first[0]), _to_host(second[0])),
        scale_strides=[first[1].stride(), second[1].stride()],
        scales=(_to_host(first[1].contiguous()), _to_host(second[1].contiguous())),
        recv_topk_idx=_to_host(recv_topk_idx),
        recv_src_idx=_to_host(handle.recv_src_idx),
        cached_bytes=bytes_since(before, buffer),
    )


def call_once(*given: Any) -> ReceivedFp8:
    """All steps at once; arguments as of call_in_steps."""
    return completed(call_in_steps(*given))


def run_case(
    group: Any, formed: Formed, device: torch.device | str = "cpu", options: dict | None = None
) -> list[ReceivedFp8]:
    """All calls of a case on one rank."""
    one = lambda buffer, call: call_once(buffer, formed, call, options)
    return run_calls(group, formed.case, device, one)


def verify(formed: Formed, results: Sequence[Sequence[ReceivedFp8]]) -> None:
    """``results[rank][call]`` against the reference."""
    case, form = formed
    for call in range(case.calls):
        received = [calls[call] for calls in results]
        _verify_dispatch(case, form, received, call, 0)
        _verify_dispatch(case, form, received, call, 1)
        if isinstance(case, InternodeCase):
            _verify_bytes(case, form, received, call)


check = functools.partial(roundtrip.check, run_case=run_case, verify=verify)
check_processes = functools.partial(roundtrip.check_processes, run_case=run_case, verify=verify)


def _verify_dispatch(
    case: Case, form: Form, results: Sequence[ReceivedFp8], call: int, repeat: int
) -> None:
    same = payload.assert_same_bits
    inputs = [make_inputs(case, rank, call) for rank in range(case.num_ranks)]
    quantised = []
    for rank in range(case.num_ranks):
        data, scales = quantise(rows_of(case, rank, call + repeat * CACHED_CALL), form.round_scale)
        quantised.append((data, pack_ue8m0(scales) if form.use_ue8m0 else scales))
    plain = reference.dispatch(
        quantised,
        [i.topk_idx for i in inputs],
        case.experts,
        [i.topk_weights for i in inputs] if case.has_weights else None,
        num_worst_tokens=worst_rows(case),
    )
    for rank, (got, one) in enumerate(zip(results, plain, strict=True)):
        if got is None:  # an absent rank
            continue
        who = f"rank {rank} call {call} repeat {repeat}"
        want = one
        mask: Any = slice(one.num_recv_tokens)
        if form.expand:
            expanded = reference.expand(
                one, num_local(case, rank), case.alignment, worst_rows(case)
            )
            mask = expanded.recv_topk_idx >= 0
            want = dataclasses.replace(
                one,
                recv_x=expanded.recv_x,
                recv_x_scales=expanded.recv_x_scales,
                recv_topk_idx=expanded.recv_topk_idx,
            )
        assert want.recv_x_scales is not None
        recv_x, scales = got.recv_x[repeat], got.scales[repeat]
        assert recv_x.dtype == torch.float8_e4m3fn
        assert recv_x.shape == want.recv_x.shape, f"{who}: {tuple(recv_x.shape)}"
        assert scales.dtype == want.recv_x_scales.dtype
        assert scales.shape == want.recv_x_scales.shape, f"{who}: {tuple(scales.shape)}"
        num_rows, num_columns = scales.shape
        aligned = max(4, -(-num_rows // 4) * 4)
        strides = (1, aligned) if form.column_major else (num_columns, 1)
        assert got.scale_strides[repeat] == strides, f"{who}: {got.scale_strides}"
        same(_rows(recv_x, mask), _rows(want.recv_x, mask), f"{who}: recv_x")
        same(_rows(scales, mask), _rows(want.recv_x_scales, mask), f"{who}: scales")
        same(got.recv_topk_idx, want.recv_topk_idx, f"{who}: recv_topk_idx")
        num_received = one.num_recv_tokens
        sources = got.recv_src_idx[:num_received], one.recv_src_idx[:num_received]
        same(*sources, f"{who}: recv_src_idx")


def _verify_bytes(
    case: InternodeCase, form: Form, results: Sequence[ReceivedFp8], call: int
) -> None:
    """What crosses is FP8: one row with its scales per (token, remote node)."""
    num_scales = case.hidden // 128
    scales = Scales(-(-num_scales // 4) if form.use_ue8m0 else num_scales)
    sent = dataclasses.replace(case, dtype=torch.float8_e4m3fn, scales=scales)
    inputs = [make_inputs(case, rank, call) for rank in range(case.num_ranks)]
    expected = dispatched_by_reference(case, inputs, [i.x for i in inputs])
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        if got is None:
            continue
        roundtrip.verify_bytes(sent, got.cached_bytes, want, rank)
