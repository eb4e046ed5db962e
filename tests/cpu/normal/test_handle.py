"""Handle: named fields, and a sequence of the first six; what a Buffer's calls take as one."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
from on_buffers import on_buffers
from run_by import run_by

import deep_comm
from deep_comm import ArgumentError, Handle, HandleMismatch, local

NUM_TOKENS, NUM_EXPERTS, HIDDEN = 6, 4, 64


def _six(num_ranks: int = 2):
    return (
        torch.zeros(num_ranks, num_ranks, dtype=torch.int32),
        torch.ones(num_ranks, 3, dtype=torch.int32),
        torch.full((num_ranks, 3), 2, dtype=torch.int32),
        torch.zeros(7, dtype=torch.int32),
        torch.zeros(5, num_ranks, dtype=torch.bool),
        torch.zeros(5, num_ranks, dtype=torch.int32),
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
    assert handle.has_default_sms is False


def _refused(value: Any, num_rows: int = 7) -> deep_comm.DeepCommError:
    """What a combine of the second of two ranks says of such a handle."""

    def rank_main(group: Any) -> deep_comm.DeepCommError | None:
        with deep_comm.Buffer(group, 4 << 20, device="cpu", timeout_s=20) as buffer:
            if buffer.rank == 1:
                with pytest.raises(deep_comm.DeepCommError) as caught:
                    buffer.combine(torch.ones(num_rows, HIDDEN), value)
                return caught.value
        return None

    return local.run(rank_main, 2, timeout_s=60)[1]


@pytest.mark.parametrize("value", [None, 3, (), _six()[:5], "handle"])
def test_anything_else_is_refused(value: object) -> None:
    error = _refused(value)
    assert isinstance(error, ArgumentError)
    assert error.argument == "handle"
    assert "must be what dispatch returned" in str(error)


def test_a_tuple_of_other_tensors_is_refused_by_position() -> None:
    six = list(_six())
    six[3] = six[3].long()
    error = _refused(tuple(six))
    assert isinstance(error, ArgumentError)
    assert error.argument == "handle[3]"
    assert "contiguous 1-D tensor of torch.int32" in str(error)


@pytest.mark.parametrize(
    ("handle", "value"),
    [
        (Handle(*_six(), rank=0), "rank 0"),
        (Handle(*_six(3), rank=1), "3 ranks"),
        (_six(3), "3 ranks"),
        (Handle(*_six(), rank=1, members=("a", "c")), "one of other ranks"),
    ],
)
def test_a_handle_of_another_group_does_not_fit(handle: Any, value: str) -> None:
    error = _refused(handle)
    assert isinstance(error, HandleMismatch)
    assert error.value == value


def test_other_row_and_channel_counts_do_not_fit() -> None:
    error = _refused(_six(), num_rows=6)
    assert isinstance(error, HandleMismatch)
    assert error.value == "7 received rows"

    def rank_main(buffer: deep_comm.Buffer) -> None:
        config = deep_comm.Config(2, 4, 8)
        with pytest.raises(HandleMismatch, match="3 channels"):
            buffer.combine(torch.ones(7, HIDDEN), _six(), config=config)
        with pytest.raises(HandleMismatch, match="5 tokens"):
            buffer.dispatch(torch.ones(6, HIDDEN), handle=_six())
        with pytest.raises(HandleMismatch, match="without expansion"):
            buffer.dispatch(torch.ones(5, HIDDEN), handle=_six(), expand=True)

    on_buffers(rank_main, 2, 4 << 20, timeout_s=20)


def _dispatched(buffer: deep_comm.Buffer, expand: bool) -> tuple[Any, ...]:
    x = torch.ones(NUM_TOKENS, HIDDEN).bfloat16()
    idx = torch.arange(NUM_TOKENS)[:, None] % NUM_EXPERTS
    received = buffer.dispatch(
        x, topk_idx=idx, topk_weights=idx.float(), num_experts=NUM_EXPERTS, expand=expand
    )
    return x, received[0], received[4]


@pytest.mark.parametrize("num_nvl_bytes", [4 << 20, 160 << 20], ids=["rings", "region"])
@pytest.mark.parametrize("expand", [False, True])
def test_a_handle_can_be_saved_and_copied(num_nvl_bytes: int, expand: bool) -> None:
    """Its tensors share memory; that must not show."""

    def rank_main(buffer: deep_comm.Buffer) -> None:
        x, rows, handle = _dispatched(buffer, expand)
        file = io.BytesIO()
        torch.save(tuple(handle), file)
        file.seek(0)
        others = [
            copy.deepcopy(handle),
            copy.copy(handle),
            pickle.loads(pickle.dumps(handle)),
            dataclasses.replace(handle),
        ]
        if expand:
            expansion = handle.expansion
            others += [
                dataclasses.replace(handle, expansion=copy.copy(expansion)),
                dataclasses.replace(handle, expansion=dataclasses.replace(expansion)),
            ]
            with pytest.raises(AttributeError):
                _ = expansion.no_such_field
        else:
            others += [torch.load(file), tuple(t.clone() for t in handle), list(handle)]
        for other in others:
            if isinstance(other, Handle):
                assert other.num_recv_tokens == handle.num_recv_tokens
                assert other.members == handle.members
            for _ in range(2):  # a second call takes what the first has found
                assert torch.equal(buffer.dispatch(x, handle=other)[0], rows)
                assert torch.equal(buffer.combine(rows, other)[0], x)

    on_buffers(rank_main, 2, num_nvl_bytes, timeout_s=20)


def _shorter(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()


@run_by(local.run, 2, timeout_s=60)
def test_tensors_of_other_extents_are_refused_and_nothing_is_launched(group, /) -> None:
    with deep_comm.Buffer(group, 4 << 20, device="cpu") as buffer:
        x, rows, handle = _dispatched(buffer, False)
        for position, dim in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (4, 1), (5, 0), (5, 1)):
            six = list(handle)
            six[position] = _shorter(six[position], dim)
            for call in (lambda: buffer.combine(rows, six), lambda: buffer.dispatch(x, handle=six)):
                with pytest.raises(ValueError, match=r"^(handle\[\d\]|handle) "):
                    call()
        assert torch.equal(buffer.combine(rows, tuple(handle))[0], x)
        x, rows, handle = _dispatched(buffer, True)
        whole = dataclasses.replace(handle.expansion)
        for name, change in (
            ("recv_rows", torch.Tensor.long),
            ("recv_rows", lambda given: given.repeat(1, 2)[:, ::2]),
            ("recv_rows", lambda given: given[:, 0]),
            ("expert_counts", lambda given: _shorter(given, 0)),
            ("expert_offsets", lambda given: _shorter(given, 0)),
            ("send_row", lambda given: _shorter(given, 0)),
            ("send_row", lambda given: None),
            ("num_expanded", lambda given: _shorter(given, 0)),
        ):
            wrong = dataclasses.replace(whole, **{name: change(getattr(whole, name))})
            with pytest.raises(ArgumentError, match=f"^handle.expansion.{name} "):
                buffer.combine(rows, dataclasses.replace(handle, expansion=wrong))
        same = dataclasses.replace(handle, expansion=whole)
        assert torch.equal(buffer.combine(rows, same)[0], x)
        group.barrier()


@pytest.mark.parametrize("expand", [False, True])
@run_by(local.run, 2, timeout_s=60)
def test_another_buffer_of_the_group_takes_a_handle(group: Any, /, expand: bool) -> None:
    options = dict(device="cpu", timeout_s=20)
    with deep_comm.Buffer(group, 4 << 20, **options) as one:
        with deep_comm.Buffer(group, 4 << 20, **options) as other:
            x, rows, handle = _dispatched(one, expand)
            given = dataclasses.replace(handle)
            for buffer in (other, one, other):
                for each in (handle, given):
                    assert torch.equal(buffer.combine(rows, each)[0], x)
                    assert torch.equal(buffer.dispatch(x, handle=each)[0], rows)


@run_by(local.run, 2, timeout_s=60)
def test_tensors_of_a_handle_outlive_the_buffer(group: Any, /) -> None:
    buffer = deep_comm.Buffer(group, 160 << 20, device="cpu", timeout_s=20)
    handle = _dispatched(buffer, True)[2]
    buffer.destroy()
    assert handle.num_recv_tokens_tensor.tolist() == [handle.num_recv_tokens]
    assert handle.expansion.expert_counts.sum() == handle.expansion.num_rows
    assert handle.recv_src_idx.shape == (handle.num_recv_tokens,)
