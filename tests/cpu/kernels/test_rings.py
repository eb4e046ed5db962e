"""Rings that wrap at every offset, rings of one slot, and many calls on one Buffer."""

import pytest
import torch
from cases import Case, Scales
from on_buffers import on_buffers
from roundtrip import call_once, check, verify

import deep_comm
from deep_comm import local

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("slots", range(1, 10))
@pytest.mark.parametrize("num_tokens", [7, 8, 9, 40])
def test_ring_wraps_at_every_offset(slots: int, num_tokens: int) -> None:
    # One expert per rank and one choice per token: the queue lengths take many values modulo the
    # slots.
    case = Case(
        (num_tokens, num_tokens + slots, 3), experts=3, topk=1, hidden=16, num_sms=1,
        send_chunk=1 + slots // 2, slots=slots, calls=2, seed=slots,
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize("send_chunk", [1, 2, 3, 5, 8])
def test_chunk_size_never_shows(send_chunk: int) -> None:
    case = Case((23, 0, 31, 8), experts=8, topk=3, num_sms=2, send_chunk=send_chunk, slots=8)
    check(case)


def test_forty_calls_in_a_row_on_one_buffer() -> None:
    case = Case(
        (13, 5, 29), experts=7, topk=3, hidden=64, num_sms=2, slots=3, send_chunk=2, calls=40
    )
    check(case)


def test_shapes_may_change_from_call_to_call_on_one_buffer() -> None:
    cases = [
        Case((9, 14), experts=4, hidden=128, seed=1),
        Case((0, 3), experts=6, hidden=2048, topk=4, num_sms=2, slots=2, send_chunk=1, seed=2),
        Case((31, 2), experts=2, hidden=16, dtype=torch.uint8, scales=Scales(3), topk=1, seed=3),
        Case((5, 5), experts=64, hidden=512, dtype=torch.float32, topk=8, worst=4, seed=4),
    ]

    def fn(buffer):
        return [call_once(buffer, case, 0) for case in cases * 3]

    results = on_buffers(fn, 2, 16 << 20)
    for number, case in enumerate(cases * 3):
        verify(case, [[calls[number]] for calls in results])


def test_one_handle_serves_many_combines() -> None:
    case = Case((17, 6, 11), experts=9, topk=3)

    def fn(group):
        from cases import make_inputs
        from roundtrip import expert_outputs, source_ranks

        with deep_comm.Buffer(group, 16 << 20, device="cpu") as buffer:
            inputs = make_inputs(case, buffer.rank)
            recv_x, _, _, _, handle, _ = buffer.dispatch(
                inputs.x,
                topk_idx=inputs.topk_idx,
                topk_weights=inputs.topk_weights,
                num_experts=case.experts,
            )
            src_rank = source_ranks(handle, buffer.rank, recv_x.shape[0])
            y = expert_outputs(case, src_rank, handle.recv_src_idx, buffer.rank, 0)
            return [buffer.combine(y, handle)[0] for _ in range(5)]

    for sums in local.run(fn, 3, timeout_s=60):
        for other in sums[1:]:
            assert torch.equal(sums[0].view(torch.int16), other.view(torch.int16))
