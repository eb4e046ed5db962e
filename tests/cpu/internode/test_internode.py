"""Dispatch, cached dispatch and combine between logical nodes, bit for bit, through rings and where
every row and sum has a slot; ranks are threads. Calls without room: test_internode_direct.py.
"""

import dataclasses

import pytest
import torch
from cases import InternodeCase, Scales, direct
from internode import SKEWED, SKEWED_CASE, random_case, skew_routing
from roundtrip import check
from schedules import some_of

pytestmark = pytest.mark.usefixtures("poison")


def with_room(case: InternodeCase) -> InternodeCase:
    return dataclasses.replace(case, nvl_bytes=6 << 20, direct_bytes=4 << 20, is_direct=True)


def as_it_is(case: InternodeCase) -> InternodeCase:
    return case


CASES = [
    (room(random_case(seed)), way)
    for room, way, seeds in (
        (as_it_is, "put", range(96)),
        (as_it_is, "stored", range(200, 224)),
        (with_room, "put", range(300, 396)),
        (with_room, "stored", range(400, 432)),
        (direct, "put", range(400, 448)),
        (direct, "stored", range(400, 448)),
    )
    for seed in some_of(seeds)
]


@pytest.mark.parametrize(("case", "way"), CASES, ids=str, indirect=["way"])
def test_every_rank_gets_its_rows_and_sums(case: InternodeCase, way: str) -> None:
    check(case)


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (3, 3)], ids=str)
def test_sum_does_not_depend_on_channels_and_rings(shape: tuple[int, int]) -> None:
    num_ranks = shape[0] * shape[1]
    tokens = tuple(11 + 3 * rank for rank in range(num_ranks))
    for num_sms, chunk, slots in ((2, 1, 2), (4, 3, 6), (10, 4, 16)):
        # verify() compares with the one reference, so equal to it means equal to each other.
        check(
            InternodeCase(
                tokens, experts=2 * num_ranks, topk=6, num_sms=num_sms, send_chunk=chunk,
                slots=slots, rail_chunk=chunk, rail_slots=slots, ranks_per_node=shape[1],
            )
        )  # fmt: skip


@pytest.mark.parametrize("rail_slots", [2, 3, 4, 5, 6, 7])
def test_rail_ring_wraps_at_every_offset(rail_slots: int) -> None:
    for num_tokens in (7, 8, 40):
        check(
            InternodeCase(
                (num_tokens, num_tokens + rail_slots, 3, 5), experts=4, topk=2, hidden=16,
                num_sms=2, send_chunk=1, slots=2, rail_chunk=rail_slots // 2,
                rail_slots=rail_slots, calls=2,
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [SKEWED_CASE, with_room(dataclasses.replace(SKEWED_CASE, rail_slots=4, rail_chunk=2))],
    ids=["rings", "room"],
)
@pytest.mark.parametrize("name", SKEWED)
def test_skewed_routing(name: str, case: InternodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens to one node, none to another, to the own node alone, one hot rank."""
    skew_routing(name, monkeypatch)
    check(case)


def test_sixteen_ranks_of_few_nodes() -> None:
    case = InternodeCase(tuple(5 + rank % 7 for rank in range(16)), experts=33, topk=8, num_sms=4)
    check(dataclasses.replace(case, ranks_per_node=4, scales=Scales(3)))
    check(with_room(dataclasses.replace(case, ranks_per_node=8)))


def test_forty_ranks_have_more_than_one_warp_of_nodes() -> None:
    """So many take the rings, whatever room there is."""
    case = InternodeCase(
        (3,) * 40, experts=80, topk=8, hidden=16, num_sms=2, ranks_per_node=1, rail_slots=2,
        rail_chunk=1, slots=2, send_chunk=1, rdma_bytes=1 << 20, nvl_bytes=1 << 18,
    )  # fmt: skip
    check(case)
    check(dataclasses.replace(case, nvl_bytes=1 << 20, direct_bytes=1 << 19, is_direct=True))


def test_chunks_grow_where_there_are_more_rows_than_words() -> None:
    case = InternodeCase(
        (2300, 3, 2500, 0), hidden=16, experts=4, topk=4, num_sms=4, ranks_per_node=2,
        slots=16, send_chunk=4, rail_slots=16, rail_chunk=1,
    )  # fmt: skip
    check(with_room(case))


@pytest.mark.parametrize("way", ["put", "stored"], indirect=True)
@pytest.mark.parametrize("scales", [Scales(70, torch.uint8, "padded"), Scales(131)], ids=str)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_more_scales_than_a_warp_keeps(ranks_per_node: int, scales: Scales, way: str) -> None:
    case = InternodeCase(
        (40, 0, 33, 27), hidden=128, experts=8, topk=4, num_sms=4, dtype=torch.float8_e4m3fn,
        scales=scales, ranks_per_node=ranks_per_node,
    )  # fmt: skip
    check(direct(case))
