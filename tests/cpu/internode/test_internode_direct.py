"""Dispatch between nodes to final places: at its limits, and where they do not fit; ranks are
threads. Cases of all shapes: test_internode.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import roundtrip
import torch
from cases import InternodeCase, Scales, direct
from internode import hundred_calls
from on_buffers import on_buffers
from roundtrip import check, verify

from deep_comm import Buffer, Config
from deep_comm.backends import cpu

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("num_nodes", [2, 40])
def test_any_number_of_nodes(num_nodes: int, way: str) -> None:
    """Forty: more destinations than a warp has lanes."""
    check(
        InternodeCase(
            (3,) * num_nodes, experts=2 * num_nodes, topk=8, hidden=80, num_sms=2,
            ranks_per_node=1, rail_slots=2, rail_chunk=1, slots=2, send_chunk=1,
            rdma_bytes=1 << 20, nvl_bytes=1 << 19, direct_bytes=1 << 18, is_direct=True,
        )
    )  # fmt: skip


def test_rows_longer_than_a_stage_travel_in_pieces(way: str) -> None:
    check(
        InternodeCase(
            (5, 3, 6, 2), hidden=40968, experts=8, topk=3, num_sms=4, scales=Scales(7), calls=2,
            nvl_bytes=64 << 20, direct_bytes=32 << 20, rdma_bytes=16 << 20, slots=4, send_chunk=2,
            is_direct=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "routing"), [((9001, 17), "one_expert"), ((9001, 3) * 2, "random")]
)
def test_more_rows_than_words_share_them(way: str, tokens: tuple[int, ...], routing: str) -> None:
    """Beyond 4096 rows between two nodes a word stands for several."""
    check(
        InternodeCase(
            tokens, hidden=16, experts=len(tokens), topk=len(tokens) // 2, num_sms=4,
            ranks_per_node=len(tokens) // 2, routing=routing, nvl_bytes=32 << 20,
            direct_bytes=24 << 20, rdma_bytes=16 << 20, is_direct=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_a_row_that_is_stored_for_the_rail_peer_is_not_copied_there(
    way: str, ranks_per_node: int
) -> None:
    """A slot holds what goes to others of the node, and what is put."""
    num_ranks = 2 * ranks_per_node

    def count_rows(buffer: Buffer) -> list[list[int]]:
        peer = (buffer.rank + ranks_per_node) % num_ranks
        first = peer // ranks_per_node * ranks_per_node
        others = [rank for rank in range(first, first + ranks_per_node) if rank != peer]
        idx = torch.full((1 + len(others), ranks_per_node), -1)
        idx[0] = torch.tensor([peer, *others])  # to the whole node
        for token, other in enumerate(others):
            idx[1 + token, 0] = other
        generator = torch.Generator().manual_seed(buffer.rank)
        x = torch.rand(len(idx), 64, generator=generator).bfloat16()
        output = buffer.dispatch(
            x, topk_idx=idx, num_experts=num_ranks,
            topk_weights=torch.ones(idx.shape), config=Config(4, 1, 4, 1, 4),
        )  # fmt: skip
        heap = buffer._context.heap
        memory = heap.view(0, [heap.num_bytes]).numpy().tobytes()
        sources = output[4].recv_src_idx.tolist()
        rows = [row.view(torch.uint8).numpy().tobytes() for row in output[0]]
        counts: list[list[int]] = [[], []]
        for source, row in zip(sources, rows, strict=True):
            counts[source > 0].append(memory.count(row))
        return counts

    results = on_buffers(
        count_rows, num_ranks, 1 << 20, 1 << 20, ranks_per_node=ranks_per_node,
        num_direct_bytes=1 << 19,
    )  # fmt: skip
    for shared, alone in results:
        # From the rail peer, whose row lies here in its slot as well if it was put; from others.
        expected = 1 if way == "stored" else 2
        assert sorted(shared) == sorted([expected] + [1] * (ranks_per_node - 1))
        assert alone == [1] * (ranks_per_node - 1)


def test_ranks_of_which_some_store_and_some_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two of a rail have to agree where rows lie, and what a chunk is."""
    arguments_of = cpu._ThreadHeap.rail_arguments

    def stores_reach(heap: cpu._ThreadHeap, peers: Sequence[int]) -> bool:
        return heap._rank < 2  # one of either rail

    def rail_arguments(heap: cpu._ThreadHeap, peers: Sequence[int]) -> dict[str, Any]:
        return arguments_of(heap, peers) | {"is_near": stores_reach(heap, peers)}

    monkeypatch.setattr(cpu._ThreadHeap, "stores_reach", stores_reach)
    monkeypatch.setattr(cpu._ThreadHeap, "rail_arguments", rail_arguments)
    check(direct(PLENTY))


def rooms(case: InternodeCase) -> dict[str, InternodeCase]:
    """Cases that have no room for direct mode, each for a reason of its own."""
    return {
        "no receive region": dataclasses.replace(case, direct_bytes=0),
        "too small a receive region": dataclasses.replace(case, direct_bytes=1 << 10),
        # Rings of few slots are all that it holds.
        "too little between nodes": dataclasses.replace(
            case, direct_bytes=case.nvl_bytes // 2, rdma_bytes=60 << 10
        ),
    }


PLENTY = InternodeCase(
    (40, 31, 25, 60), hidden=128, experts=8, topk=4, num_sms=4, slots=4, send_chunk=2,
    rail_slots=4, rail_chunk=2, calls=2, nvl_bytes=4 << 20, rdma_bytes=4 << 20,
)  # fmt: skip


@pytest.mark.parametrize("reason", list(rooms(PLENTY)))
def test_without_room_rows_take_the_rings(reason: str, way: str) -> None:
    check(rooms(PLENTY)[reason])  # is_direct is False: bytes on the rail are those of rings


def test_where_puts_do_not_fit_stores_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots to put from are needed only where there are puts."""
    slot = roundtrip.slot_bytes(direct(PLENTY), PLENTY.topk)
    case = dataclasses.replace(direct(PLENTY), rdma_bytes=61 * slot)  # 60 tokens at most
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    check(case)
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "0")
    check(dataclasses.replace(case, is_direct=False))


def test_one_rank_without_room_sends_all_to_the_rings(way: str) -> None:
    """Outputs that a rank keeps fill its receive region; the others' have room."""
    case = dataclasses.replace(PLENTY, calls=1)

    def fn(buffer):
        free = roundtrip.call_once(buffer, direct(case), 0)
        kept, num_bytes = [], 2 << 20
        while buffer.rank == 3 and num_bytes >= 256:
            block = buffer._context.region.allocate(num_bytes)
            if block is None:
                num_bytes //= 2
            else:
                kept.append(block)
        full = roundtrip.call_once(buffer, case, 0)
        kept.clear()
        again = roundtrip.call_once(buffer, direct(case), 0)
        return free, full, again

    results = on_buffers(fn, 4, 4 << 20, 4 << 20, ranks_per_node=2, num_direct_bytes=2 << 20)
    for number, wanted in enumerate((direct(case), case, direct(case))):
        verify(wanted, [[calls[number]] for calls in results])


def test_a_hundred_calls_of_changing_shapes_and_modes_on_one_buffer(way: str) -> None:
    hundred_calls(7, 2 << 20, worst=(0, 0, 2), num_direct_bytes=1 << 20)
