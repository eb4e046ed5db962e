"""The allocator of the receive region."""

import gc

import pytest
import torch

import deep_comm
from deep_comm import local
from deep_comm.events import EventHandle
from deep_comm.handle_parts import slab_layout
from deep_comm.region import Region


def region(
    begin: int = 0,
    end: int = 1024,
    capturing=lambda: False,
    mark=lambda stream: None,
    current_stream=lambda: 0,
    mark_captured=lambda stream: None,
) -> Region:
    return Region(begin, end, mark, capturing, current_stream, mark_captured)


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


def test_the_next_owner_waits_for_the_last_use_on_every_stream() -> None:
    events = {name: EventHandle() for name in "abc"}
    marks = iter([(1, "a"), (2, "b"), (1, "c")])
    stream = [1]

    def mark(number: int) -> EventHandle | None:
        wanted, name = next(marks, (number, ""))
        assert number == wanted
        return events.get(name)

    r = region(end=384, mark=mark, current_stream=lambda: stream[0])
    one = r.allocate(128)[0]
    stream[0] = 2
    two = r.allocate(128)[0]
    stream[0] = 1
    three = r.allocate(128)[0]
    del one  # a, on stream 1
    stream[0] = 2
    del two  # b, on stream 2
    stream[0] = 1
    del three  # c, on stream 1 again: behind a
    _, waits = r.allocate(384)
    assert waits == [events["c"], events["b"]]


def test_the_stream_of_the_allocation_counts_as_well() -> None:
    stream = [1]
    r = region(end=128, mark=lambda number: number, current_stream=lambda: stream[0])
    block = r.allocate(128)[0]
    stream[0] = 2
    del block
    assert r.allocate(128, after=2)[1] == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bytes_whose_reader_is_not_known_go_to_nobody() -> None:
    def mark(number: int) -> None:
        raise RuntimeError("no event")

    r = region(mark=mark)
    block = r.allocate(1024)[0]
    del block
    assert r.allocate(1) is None


def test_blocks_of_a_capture_go_to_captures_only() -> None:
    capturing = [True]
    r = region(capturing=lambda: capturing[0])
    block = r.allocate(512)[0]
    del block
    capturing[0] = False
    assert r.allocate(1024) is None
    assert r.allocate(512)[0].offset == 512
    capturing[0] = True
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

    def rank_main(group):
        x = torch.ones(8, 64).bfloat16()
        idx = torch.arange(8)[:, None] % 4
        with deep_comm.Buffer(group, 128 << 20, device="cpu", timeout_s=20) as buffer:
            rows = buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=4)[0]
            if is_torchs:
                rows.untyped_storage().resize_(0)
            else:
                with pytest.raises(RuntimeError, match="not resizable"):
                    rows.untyped_storage().resize_(0)

    local.run(rank_main, 2)


def test_a_handle_does_not_keep_the_payload() -> None:
    def rank_main(group):
        x = torch.ones(64, 1024).bfloat16()
        idx = torch.arange(64)[:, None] % 4
        with deep_comm.Buffer(
            group, 4 << 20, num_direct_bytes=2 << 20, device="cpu", timeout_s=20
        ) as buffer:
            whole = buffer._context.region.num_free_bytes
            handle = buffer.dispatch(x, topk_idx=idx, topk_weights=idx.float(), num_experts=4)[4]
            gc.collect()
            routing = slab_layout(2, handle.num_channels, 2, 64, True).num_bytes
            used = whole - buffer._context.region.num_free_bytes
            return used - routing, handle.recv_src_idx.numel()

    for used, num_rows in local.run(rank_main, 2):
        assert used <= 4 * num_rows + 128
