"""Dispatch, cached dispatch and combine between logical nodes, bit for bit; ranks are threads."""

import pytest
from cases import InternodeCase, Scales
from internode import SKEWED, SKEWED_CASE, random_case, skew_routing
from roundtrip import check
from schedules import some_of

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("case", [random_case(seed) for seed in some_of(range(96))], ids=str)
def test_every_rank_gets_its_rows_and_sums(case: InternodeCase) -> None:
    check(case)


@pytest.mark.parametrize("case", [random_case(seed) for seed in some_of(range(200, 224))], ids=str)
def test_rows_stored_into_near_nodes_are_the_same(
    case: InternodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
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


@pytest.mark.parametrize("name", SKEWED)
def test_skewed_routing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens to one node, none to another, to the own node alone, one hot rank."""
    skew_routing(name, monkeypatch)
    check(SKEWED_CASE)


def test_sixteen_ranks_of_four_nodes() -> None:
    tokens = tuple(5 + rank % 7 for rank in range(16))
    check(InternodeCase(tokens, experts=33, topk=8, num_sms=4, ranks_per_node=4, scales=Scales(3)))


def test_forty_ranks_have_more_than_one_warp_of_nodes() -> None:
    check(
        InternodeCase(
            (3,) * 40, experts=80, topk=8, hidden=16, num_sms=2, ranks_per_node=1, rail_slots=2,
            rail_chunk=1, slots=2, send_chunk=1, rdma_bytes=1 << 20, nvl_bytes=1 << 18,
        )
    )  # fmt: skip
