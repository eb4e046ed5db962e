"""Buffer beyond its operations: attributes, life cycle, views, events, defaults."""

from __future__ import annotations

import gc
import inspect
import os
import weakref

import pytest
import torch
from on_buffers import on_buffers
from run_by import run_by

from deep_comm import (
    ArgumentError,
    Buffer,
    CapacityError,
    Config,
    EventHandle,
    EventOverlap,
    PeerTimeout,
    UnsupportedError,
    local,
)

E, K, H = 6, 2, 32


def _tokens(rank: int, num_tokens: int = 8):
    generator = torch.Generator().manual_seed(rank)
    return {
        "x": torch.randn(num_tokens, H, generator=generator),
        "topk_idx": torch.randint(0, E, (num_tokens, K), generator=generator),
        "topk_weights": torch.rand(num_tokens, K, generator=generator),
        "num_experts": E,
    }


@run_by(local.run, 2)
def test_attributes_are_those_that_callers_read(group: local.ThreadGroup, /) -> None:
    buffer = Buffer(group, 4096, 128, device="cpu", explicitly_destroy=True)
    assert (buffer.rank, buffer.group_size) == (group.rank(), 2)
    assert buffer.group is group
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (4096, 128)
    assert not buffer.low_latency_mode and not buffer.enable_shrink
    assert buffer.explicitly_destroy
    assert buffer.device == torch.device("cpu")
    assert buffer.runtime.num_launches == 0
    buffer.destroy()


def test_constructor_positions_are_those_that_callers_use() -> None:
    names = list(inspect.signature(Buffer).parameters)
    assert names[:11] == [
        "group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank",
        "allow_nvlink_for_low_latency_mode", "allow_mnnvl", "use_fabric", "explicitly_destroy",
        "enable_shrink", "comm",
    ]  # fmt: skip


@run_by(local.run, 2)
def test_a_buffer_dies_with_its_last_reference(group: local.ThreadGroup, /) -> None:
    buffer = Buffer(group, 4096, device="cpu")
    runtime = buffer.runtime
    reference = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert reference() is None
    with pytest.raises(RuntimeError):  # the engine is closed with it
        runtime.poll_error()


@run_by(local.run, 4)
def test_a_rank_that_ends_early_leaves_its_memory_to_the_others(
    group: local.ThreadGroup, /
) -> None:
    for _ in range(20):
        buffer = Buffer(group, 1 << 16, device="cpu")
        given = _tokens(group.rank())
        recv_x, _, _, _, handle, _ = buffer.dispatch(**given)
        buffer.combine(recv_x, handle)
        buffer.destroy()  # no barrier: peers may still be inside combine


@run_by(local.run, 1)
def test_the_local_buffer_is_seen_as_a_tensor_that_outlives_the_buffer(
    group: local.ThreadGroup, /
) -> None:
    buffer = Buffer(group, 1024, device="cpu")
    whole = buffer.get_local_buffer_tensor(torch.int32)
    assert whole.shape == (256,) and whole.dtype == torch.int32
    whole.copy_(torch.arange(256, dtype=torch.int32))
    part = buffer.get_local_buffer_tensor(torch.int32, torch.Size([2, 3]), offset=10)
    assert part.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert buffer.get_local_buffer_tensor(torch.int64, offset=100).shape == (28,)
    for options in (
        {"offset": 257},
        {"offset": -1},
        {"size": (300,)},
        {"size": (2,), "offset": 255},
    ):
        with pytest.raises(ArgumentError):
            buffer.get_local_buffer_tensor(torch.int32, **options)
    with pytest.raises(UnsupportedError):
        buffer.get_local_buffer_tensor(torch.int32, use_rdma_buffer=True)
    buffer.destroy()
    del buffer
    gc.collect()
    assert int(whole.sum()) == 255 * 128


@run_by(local.run, 1)
def test_an_empty_local_buffer_is_an_empty_tensor(group: local.ThreadGroup, /) -> None:
    assert Buffer(group, device="cpu").get_local_buffer_tensor(torch.int8).shape == (0,)


@run_by(on_buffers, 1, 1 << 16)
def test_an_event_comes_back_if_and_only_if_the_call_was_asynchronous(buffer: Buffer, /) -> None:
    given = _tokens(0)
    for asynchronous in (False, True):
        previous = EventOverlap(EventHandle()) if asynchronous else EventOverlap(None)
        streams = {
            "previous_event": previous,
            "async_finish": asynchronous,
            "allocate_on_comm_stream": asynchronous,
        }
        *layout, event = buffer.get_dispatch_layout(given["topk_idx"], E, **streams)
        assert isinstance(event, EventOverlap) and (event.event is not None) == asynchronous
        *_, handle, event = buffer.dispatch(**given, **streams)
        assert (event.event is not None) == asynchronous
        *_, event = buffer.combine(given["x"], handle, **streams)
        assert (event.event is not None) == asynchronous
        if asynchronous:
            event.current_stream_wait()
        with event:
            pass


def test_events_can_be_made_without_a_buffer() -> None:
    assert Buffer.capture().event is not None
    with EventOverlap() as event:
        assert event.event is None
    with pytest.raises(ArgumentError):
        EventOverlap(None).current_stream_wait()


@run_by(local.run, 1)
def test_the_host_target_has_no_stream(group: local.ThreadGroup, /) -> None:
    with pytest.raises(UnsupportedError):
        Buffer(group, device="cpu").get_comm_stream()


def test_the_environment_chooses_device_channels_and_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEP_COMM_DEVICE", "cpu")
    monkeypatch.setenv("DEEP_COMM_NUM_SMS", "3")
    monkeypatch.setenv("DEEP_COMM_TIMEOUT_S", "0.3")

    def main(group: local.ThreadGroup) -> None:
        buffer = Buffer(group, 1 << 20)
        assert buffer.device.type == "cpu"
        *_, handle, _ = buffer.dispatch(**_tokens(group.rank()))
        assert handle.num_channels == 3
        if group.rank() == 0:
            with pytest.raises(PeerTimeout) as caught:
                buffer.dispatch(**_tokens(group.rank()))
            assert caught.value.peer == 1 and 0.2 < caught.value.waited_s < 5

    local.run(main, 2)


@run_by(on_buffers, 2, 1 << 20)
def test_a_handle_brings_its_channels_along(buffer: Buffer, /) -> None:
    given = _tokens(buffer.rank)
    recv_x, *_, handle, _ = buffer.dispatch(**given, config=Config(4, 2, 8))
    assert handle.num_channels == 4
    again, *_ = buffer.dispatch(given["x"], handle)
    assert torch.equal(again, recv_x)
    buffer.combine(recv_x, handle)


@pytest.mark.usefixtures("poison")
@run_by(on_buffers, 2, 1 << 20)
def test_poisoned_outputs_are_written_in_full(buffer: Buffer, /) -> None:
    given = _tokens(buffer.rank)
    recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(**given)
    poison = torch.full((4,), 0xA5, dtype=torch.uint8)
    for tensor in (recv_x, recv_idx, recv_weights, *handle):
        if tensor.dtype.itemsize >= 4:
            assert not (
                tensor
                == poison.view(torch.int32 if tensor.dtype == torch.int32 else torch.float32)[0]
            ).any()
    assert handle.num_recv_tokens_per_expert.tolist() == counts
    worst, *_ = buffer.dispatch(**given, num_worst_tokens=64)
    tail = worst[len(recv_x) :].contiguous().view(torch.uint8)
    assert (tail == 0xA5).all()  # payload past the received rows is not written


@run_by(on_buffers, 2, 1 << 20)
def test_too_few_worst_case_rows_are_reported_and_nothing_is_lost(buffer: Buffer, /) -> None:
    given = _tokens(buffer.rank)
    recv_x, *_ = buffer.dispatch(**given)
    with pytest.raises(CapacityError) as caught:
        buffer.dispatch(**given, num_worst_tokens=len(recv_x) - 1)
    assert caught.value.needed_rows == len(recv_x)
    assert caught.value.available_rows == len(recv_x) - 1
    again, *_ = buffer.dispatch(**given)
    assert torch.equal(again, recv_x)


@run_by(on_buffers, 3, 1 << 20, timeout_s=1.5)
def test_a_buffer_goes_on_after_reset(buffer: Buffer, /) -> None:
    given = _tokens(buffer.rank)
    expected, *_, handle, _ = buffer.dispatch(**given)
    if buffer.rank != 2:
        with pytest.raises(PeerTimeout) as caught:
            buffer.dispatch(**given)
        assert caught.value.peer == 2
        with pytest.raises(PeerTimeout):  # until reset
            buffer.combine(expected, handle)
    buffer.reset()
    buffer.check()
    again, *_ = buffer.dispatch(given["x"], handle)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("hidden_bytes", [16, 4096, 14336])
def test_ring_bytes_hold_the_rings_of_every_call_it_allows(
    num_ranks: int, hidden_bytes: int
) -> None:
    from deep_comm import _core

    for config in (Buffer.get_dispatch_config(num_ranks), Config(2, 1, 1), Config(132, 8, 64)):
        hint = config.ring_bytes(hidden_bytes, num_ranks)
        for num_topk, scale_row_bytes in ((0, 0), (8, 224), (64, 512)):
            needed = _core.Engine.ring_bytes(
                num_ranks=num_ranks, num_channels=config.num_channels, num_slots=config.num_slots,
                row_bytes=hidden_bytes, scale_row_bytes=scale_row_bytes, num_topk=num_topk,
            )  # fmt: skip
            assert needed <= hint


def test_names_of_shared_memory_are_gone_once_a_buffer_is_built() -> None:
    class ProcessLike:
        """A group whose ranks are taken for processes: they share memory by name."""

        def __init__(self, group: local.ThreadGroup) -> None:
            self.in_process, self.simulation = False, None
            self.rank, self.size = group.rank, group.size
            self.all_gather_object = group.all_gather_object

    def main(group: local.ThreadGroup) -> None:
        buffer = Buffer(ProcessLike(group), 1 << 20, device="cpu")
        group.barrier()
        own = f"deep_comm.{os.getuid()}.{os.getpid()}."
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(own)]
        given = _tokens(group.rank())
        recv_x, *_, handle, _ = buffer.dispatch(**given)
        buffer.combine(recv_x, handle)

    local.run(main, 3)


def test_routing_without_weights_moves_rows_and_indices() -> None:
    def rank_main(group):
        x = torch.arange(40.0)[:, None].expand(40, 64).bfloat16().contiguous()
        idx = torch.arange(40)[:, None] % 4
        found = []
        for direct in (0, 1 << 20):
            with Buffer(
                group, 2 << 20, num_direct_bytes=direct, device="cpu", timeout_s=20
            ) as buffer:
                recv, recv_idx, weights, counts, handle, _ = buffer.dispatch(
                    x, topk_idx=idx, num_experts=4
                )
                found.append((recv.clone(), recv_idx.clone(), weights, counts))
        return found

    for rings, direct in local.run(rank_main, 2):
        assert torch.equal(rings[0], direct[0]) and torch.equal(rings[1], direct[1])
        assert rings[2] is None and direct[2] is None and sum(rings[3]) == 40


@run_by(local.run, 1)
def test_a_row_that_kernels_cannot_count_is_refused(group: local.ThreadGroup, /) -> None:
    """Not moved in part. Its memory is never touched."""
    with Buffer(group, 1 << 16, device="cpu") as buffer:
        x = torch.empty(1, 2**31 + 16, dtype=torch.uint8)
        with pytest.raises(ArgumentError, match="^x must have rows of at most 2147483647 bytes"):
            buffer.dispatch(x, topk_idx=torch.zeros(1, 1, dtype=torch.int64), num_experts=1)
