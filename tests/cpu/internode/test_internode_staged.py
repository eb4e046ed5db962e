"""Combine between nodes with a slot for every row and sum, bit for bit; ranks are threads."""

import dataclasses

import pytest
from cases import InternodeCase
from internode import SKEWED, SKEWED_CASE, random_case, skew_routing
from roundtrip import check
from schedules import some_of

pytestmark = pytest.mark.usefixtures("poison")


def with_room(case: InternodeCase) -> InternodeCase:
    return dataclasses.replace(case, nvl_bytes=6 << 20, direct_bytes=4 << 20, is_direct=True)


@pytest.mark.parametrize(
    "case", [with_room(random_case(seed)) for seed in some_of(range(300, 396))], ids=str
)
def test_every_token_gets_its_sums(case: InternodeCase) -> None:
    check(case)


@pytest.mark.parametrize(
    "case", [with_room(random_case(seed)) for seed in some_of(range(400, 432))], ids=str
)
def test_sums_stored_into_near_nodes_are_the_same(
    case: InternodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    check(case)


@pytest.mark.parametrize("name", SKEWED)
def test_skewed_routing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skew_routing(name, monkeypatch)
    check(with_room(dataclasses.replace(SKEWED_CASE, rail_slots=4, rail_chunk=2)))


def test_eight_ranks_a_node() -> None:
    tokens = tuple(5 + rank % 7 for rank in range(16))
    check(with_room(InternodeCase(tokens, experts=33, topk=8, num_sms=4, ranks_per_node=8)))


def test_more_nodes_than_a_warp_has_lanes_take_the_rings() -> None:
    case = InternodeCase(
        (3,) * 40, experts=80, topk=8, hidden=16, num_sms=2, ranks_per_node=1, rail_slots=2,
        rail_chunk=1, slots=2, send_chunk=1, rdma_bytes=1 << 20,
    )  # fmt: skip
    check(dataclasses.replace(case, nvl_bytes=1 << 20, direct_bytes=1 << 19, is_direct=True))


def test_chunks_grow_where_there_are_more_rows_than_words() -> None:
    case = InternodeCase(
        (2300, 3, 2500, 0), hidden=16, experts=4, topk=4, num_sms=4, ranks_per_node=2,
        slots=16, send_chunk=4, rail_slots=16, rail_chunk=1,
    )  # fmt: skip
    check(with_room(case))
