"""Handle: named fields, and a sequence of the first six."""

from __future__ import annotations

import pytest
import torch

import deep_comm
from deep_comm import ArgumentError, Handle, HandleMismatch, local

CPU = torch.device("cpu")


def _six(num_ranks: int = 2, num_channels: int = 3, num_tokens: int = 5, num_rows: int = 7):
    return (
        torch.zeros(num_ranks, num_ranks, dtype=torch.int32),
        torch.ones(num_ranks, num_channels, dtype=torch.int32),
        torch.full((num_ranks, num_channels), 2, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.zeros(num_tokens, num_ranks, dtype=torch.bool),
        torch.zeros(num_tokens, num_ranks, dtype=torch.int32),
    )


def test_positions_are_the_first_six_fields() -> None:
    six = _six()
    handle = Handle(*six, rank=1, members=("a", "b"))
    assert len(handle) == 6
    assert handle[0] is handle.rank_prefix_matrix is six[0]
    assert handle[-1] is handle.send_head is six[5]
    assert handle[1:3] == (six[1], six[2])
    a, b, c, d, e, f = handle
    assert (c, e) == (handle.recv_channel_prefix_matrix, handle.is_token_in_rank)
    assert tuple(handle) == six
    with pytest.raises(IndexError):
        handle[6]


def test_shapes_have_names() -> None:
    handle = Handle(*_six())
    assert (handle.num_ranks, handle.num_channels) == (2, 3)
    assert (handle.num_tokens, handle.num_recv_rows) == (5, 7)
    assert handle.num_recv_tokens is None


def test_a_plain_tuple_of_six_serves_as_handle() -> None:
    assert Handle.of(_six()).num_channels == 3
    handle = Handle(*_six())
    assert Handle.of(handle) is handle


@pytest.mark.parametrize("value", [None, 3, (), _six()[:5], "handle"])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        Handle.of(value)
    assert caught.value.argument == "handle"


def test_a_tuple_of_other_tensors_is_refused_by_position() -> None:
    six = list(_six())
    six[3] = six[3].long()
    with pytest.raises(ArgumentError) as caught:
        Handle.of(tuple(six))
    assert caught.value.argument == "handle[3]"


def test_a_handle_of_another_group_does_not_fit() -> None:
    handle = Handle(*_six(), rank=1, members=("a", "b"))
    handle.require_group(1, 2, ("a", "b"), CPU)
    for rank, num_ranks, members in (
        (0, 2, ("a", "b")),
        (1, 3, ("a", "b", "c")),
        (1, 2, ("a", "c")),
    ):
        with pytest.raises(HandleMismatch):
            handle.require_group(rank, num_ranks, members, CPU)


def test_other_token_and_channel_counts_do_not_fit() -> None:
    handle = Handle(*_six())
    handle.require_num_tokens(5)
    handle.require_num_channels(3)
    with pytest.raises(HandleMismatch, match="5 tokens"):
        handle.require_num_tokens(6)
    with pytest.raises(HandleMismatch, match="3 channels"):
        handle.require_num_channels(1)


def test_a_handle_can_be_saved_and_copied() -> None:
    """Its tensors share memory; that must not show."""
    import copy
    import io

    def rank_main(group):
        with deep_comm.Buffer(group, 4 << 20, device="cpu", timeout_s=20) as buffer:
            x = torch.ones(6, 64).bfloat16()
            idx = torch.arange(6)[:, None] % 4
            handle = buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=4)[4]
            file = io.BytesIO()
            torch.save(tuple(handle), file)
            file.seek(0)
            saved = torch.load(file)
            for other in (saved, copy.deepcopy(handle), tuple(t.clone() for t in handle)):
                rows = buffer.dispatch(x, handle=other)[0]
                assert torch.equal(buffer.combine(rows, other)[0], x)

    local.run(rank_main, 2, timeout_s=60)
