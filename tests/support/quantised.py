"""Dispatches that quantise on the way, of one tier or two, against the reference's cast and a
dispatch of what it gives, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import internode
import payload
import torch
from cases import Case, Scales, here, make_inputs, verify_each
from expanded import _rail_bytes, _rows, _to_host, buffer_of, num_local, worst_rows
from internode import InternodeCase
from roundtrip import CACHED_CALL, Steps, _to, _wait, completed, config_of, made_for
from torch import Tensor

import deep_comm
from deep_comm import reference
from deep_comm.reference import internode as reference_internode
from deep_comm.reference.low_latency import pack_ue8m0, quantise


@dataclass(frozen=True)
class Form:
    """What a case asks of dispatch beside its own options."""

    round_scale: bool = False
    use_ue8m0: bool = False
    column_major: bool = False
    expand: bool = False


FORMS = [
    Form(),
    Form(round_scale=True),
    Form(round_scale=True, use_ue8m0=True),
    Form(column_major=True),
    Form(round_scale=True, use_ue8m0=True, column_major=True, expand=True),
    Form(expand=True),
]


@dataclass(frozen=True)
class ReceivedFp8:
    """What one rank got out of one call, cached and not; tensors on the host, but see
    roundtrip.results_stay."""

    recv_x: tuple[Tensor, Tensor]
    scale_strides: list[tuple[int, ...]]
    scales: tuple[Tensor, Tensor]
    recv_topk_idx: Tensor
    recv_src_idx: Tensor
    cached_bytes: list[list[int]] | None  # that the cached dispatch has put on the rail


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
    buffer: deep_comm.Buffer, case: Case, form: Form, call: int, options: dict | None = None
) -> Steps[ReceivedFp8]:
    rank, device = buffer.rank, buffer.device
    options = dict(options or {})
    with made_for(device):
        inputs = make_inputs(case, rank, call)
        rows = [rows_of(case, rank, number) for number in (call, call + CACHED_CALL)]
    config = internode.config_of(case) if isinstance(case, InternodeCase) else config_of(case)
    options.update(
        config=config,
        use_fp8=True,
        round_scale=form.round_scale,
        use_ue8m0=form.use_ue8m0,
        column_major_scales=form.column_major,
    )
    first, recv_topk_idx, _, _, handle, event = buffer.dispatch(
        _to(rows[0], device),
        topk_idx=_to(inputs.topk_idx, device),
        topk_weights=_to(inputs.topk_weights, device),
        num_experts=case.experts,
        expert_alignment=case.alignment,
        num_worst_tokens=worst_rows(case),
        expand=form.expand,
        **options,
    )
    _wait(event)
    yield
    before = _rail_bytes(buffer, case)
    again = _to(rows[1], device)
    second, *_, event = buffer.dispatch(again, handle=handle, **options)
    _wait(event)
    return ReceivedFp8(
        recv_x=(_to_host(first[0]), _to_host(second[0])),
        scale_strides=[first[1].stride(), second[1].stride()],
        scales=(_to_host(first[1].contiguous()), _to_host(second[1].contiguous())),
        recv_topk_idx=_to_host(recv_topk_idx),
        recv_src_idx=_to_host(handle.recv_src_idx),
        cached_bytes=internode.bytes_since(before, _rail_bytes(buffer, case)),
    )


def call_once(*given: Any) -> ReceivedFp8:
    """All steps at once; arguments as of call_in_steps."""
    return completed(call_in_steps(*given))


def run_case(
    group: Any,
    case: Case,
    form: Form,
    device: torch.device | str = "cpu",
    options: dict | None = None,
) -> list[ReceivedFp8]:
    """All calls of a case on one rank."""
    with buffer_of(group, case, device) as buffer:
        assert buffer.runtime is not None
        if case.smem_bytes is not None:
            buffer.runtime.smem_bytes_limit = case.smem_bytes
        return [call_once(buffer, case, form, call, options) for call in range(case.calls)]


def verify(case: Case, form: Form, results: Sequence[Sequence[ReceivedFp8]]) -> None:
    """``results[rank][call]`` against the reference."""
    for call in range(case.calls):
        received = [calls[call] for calls in results]
        _verify_dispatch(case, form, received, call, 0)
        _verify_dispatch(case, form, received, call, 1)
        if isinstance(case, InternodeCase):
            _verify_bytes(case, form, received, call)


def verify_all(cases: list[tuple[Case, Form]], results: list) -> None:
    verify_each(lambda case_and_form, ranks: verify(*case_and_form, ranks), cases, results)


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
        [i.topk_weights for i in inputs],
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
    expected = reference_internode.dispatch(
        [i.x for i in inputs], [i.topk_idx for i in inputs], case.experts, case.ranks_per_node,
    )  # fmt: skip
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        if got is None:
            continue
        assert got.cached_bytes is not None
        internode.verify_bytes(sent, got.cached_bytes, want, rank)
