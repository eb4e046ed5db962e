"""The allocator of the receive region."""

import gc

import fake_cuda
import pytest
import torch
from on_buffers import on_buffers
from small_calls import routing_bytes

import deep_comm
from deep_comm import _core, _simt_tests, local
from deep_comm._core import Region
from deep_comm.backends.base import EXCHANGE_API

WAITING = 99  # a stream that only waits


def region(begin: int = 0, end: int = 1024, log: fake_cuda.Log | None = None) -> Region:
    """``log``: of its streams; without any, kernels have ended when they are launched."""
    streams = _core.streams() if log is None else _simt_tests.fake_streams(log)
    framework = _core.TorchFramework(
        device=torch.device("cpu"),
        comm_stream=None,
        exchange_api=EXCHANGE_API,
        current_stream=None if log is None else lambda: log.current,
    )
    return Region(begin, end, streams, framework)


def test_blocks_do_not_overlap_and_come_back() -> None:
    r = region()
    blocks = [r.allocate(200)[0] for _ in range(4)]
    assert sorted(b.offset for b in blocks) == [0, 256, 512, 768]
    assert r.allocate(1) is None
    blocks.sort(key=lambda block: block.offset)
    del blocks[1:3]
    assert r.num_free_bytes == 512
    assert r.allocate(512)[0].offset == 256


def test_blocks_that_shrink_do_not_settle_in_the_middle() -> None:
    """Of a program that holds a block until it has the next, and takes more than it needs at
    first."""
    r = region(end=64 << 10)
    held = None
    for _ in range(10):
        small = r.allocate(512)[0]
        taken = r.allocate(28 << 10)
        assert taken is not None
        block = taken[0]
        block.shrink(24 << 10)
        small.shrink(256)
        held = small, block
    assert held is not None and r.num_free_bytes == (40 << 10) - 256


def test_an_unaligned_beginning_is_rounded_up() -> None:
    assert region(begin=130).allocate(1)[0].offset == 256


def test_an_empty_block_has_a_place_of_its_own() -> None:
    r = region()
    one, other = r.allocate(0)[0], r.allocate(0)[0]
    assert one.offset != other.offset


def _waited_for(log: fake_cuda.Log, events: list[_core.Event]) -> set[object]:
    """The work that comes before these events."""
    for event in events:
        event.wait(WAITING)
    return log.known[WAITING]


def _mark_work(log: fake_cuda.Log, stream: int, name: str) -> None:
    log.current = stream
    log.work(name)


def test_the_next_owner_waits_for_the_last_use_on_every_stream() -> None:
    log = fake_cuda.Log()
    r = region(end=384, log=log)
    log.current = 1
    one = r.allocate(128)[0]
    log.current = 2
    two = r.allocate(128)[0]
    log.current = 1
    three = r.allocate(128)[0]
    _mark_work(log, 1, "a")
    del one
    _mark_work(log, 2, "b")
    del two
    _mark_work(log, 1, "c")
    del three
    log.work("later")
    assert [stream for name, stream in log if name == "mark"] == [1, 2, 1]
    _, waits = r.allocate(384)
    assert len(waits) == 2  # of stream 1, only the later one
    assert _waited_for(log, waits) == {"a", "b", "c"}


def test_the_stream_of_the_allocation_counts_as_well() -> None:
    log = fake_cuda.Log()
    r = region(end=128, log=log)
    log.current = 1
    block = r.allocate(128)[0]
    log.work("of stream 1")
    _mark_work(log, 2, "of stream 2")
    del block
    _, waits = r.allocate(128, is_behind_caller=True)
    assert len(waits) == 1 and _waited_for(log, waits) == {"of stream 1"}


def test_nothing_is_recorded_for_an_eager_block_that_goes_in_a_capture() -> None:
    """Not on the stream that took it either: one that cannot be asked may not be recorded on."""
    log = fake_cuda.Log()
    r = region(end=128, log=log)
    log.current = 1
    block = r.allocate(128)[0]
    log.current = 2
    log.capturing.add(2)
    log.clear()
    del block
    assert log == []
    log.capturing.clear()
    assert r.allocate(128)[1] == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bytes_whose_reader_is_not_known_go_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(log: fake_cuda.Log, stream: int) -> None:
        raise RuntimeError("no event")

    monkeypatch.setattr(fake_cuda.Log, "mark", mark)
    r = region(log=fake_cuda.Log())
    block = r.allocate(1024)[0]
    del block
    assert r.allocate(1) is None


def test_blocks_of_a_capture_go_to_captures_only() -> None:
    log = fake_cuda.Log()
    log.capturing.add(log.current)
    r = region(log=log)
    block = r.allocate(512)[0]
    del block
    log.capturing.clear()
    assert r.allocate(1024) is None
    assert r.allocate(512)[0].offset == 512
    log.capturing.add(log.current)
    assert r.allocate(512)[0].offset == 0


@pytest.mark.parametrize("num_nvl_bytes", [(4 << 20) + 100, 4 << 20])
def test_outputs_lie_in_the_region_while_there_is_room(num_nvl_bytes: int) -> None:
    def rank_main(group):
        x = torch.full((50, 1024), float(group.rank())).bfloat16()
        idx = torch.arange(50)[:, None] % 4
        with deep_comm.Buffer(
            group, num_nvl_bytes, num_direct_bytes=1 << 20, device="cpu", timeout_s=20
        ) as buffer:
            heap = buffer._context.heap
            kept, places = [], []
            for _ in range(12):
                received = buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=4)
                places.append(heap.base <= received[0].data_ptr() < heap.base + heap.num_bytes)
                kept.append(received[0])
            assert all(torch.equal(kept[0], other) for other in kept)
            free = buffer._context.region.num_free_bytes
            del kept, received
            gc.collect()
            assert buffer._context.region.num_free_bytes > free
            return places

    for places in local.run(rank_main, 2):
        assert places[0] and not places[-1]  # 200 KiB a call: the region is full before the last
        assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("is_torchs", [False, True])
def test_outputs_of_torchs_own_on_demand(monkeypatch: pytest.MonkeyPatch, is_torchs: bool) -> None:
    """Programs that resize the storage of what dispatch returns need them (Megatron-Core, when it
    overlaps its exchanges)."""
    if is_torchs:
        monkeypatch.setenv("DEEP_COMM_NUM_DIRECT_BYTES", "0")

    def rank_main(buffer):
        x = torch.ones(8, 64).bfloat16()
        idx = torch.arange(8)[:, None] % 4
        rows = buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=4)[0]
        if is_torchs:
            rows.untyped_storage().resize_(0)
        else:
            with pytest.raises(RuntimeError, match="not resizable"):
                rows.untyped_storage().resize_(0)

    on_buffers(rank_main, 2, 128 << 20, timeout_s=20)


def test_a_handle_does_not_keep_the_payload() -> None:
    def rank_main(buffer):
        x = torch.ones(64, 1024).bfloat16()
        idx = torch.arange(64)[:, None] % 4
        whole = buffer._context.region.num_free_bytes
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=4)[4]
        gc.collect()
        used = whole - buffer._context.region.num_free_bytes
        return used - routing_bytes(handle), handle.recv_src_idx.numel()

    for used, num_rows in on_buffers(rank_main, 2, 4 << 20, num_direct_bytes=2 << 20, timeout_s=20):
        assert used <= 4 * num_rows + 128
