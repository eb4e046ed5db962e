"""combine(topk_idx=) of three and more ranks per node: a node's ranks are added in the order of the
token's last selections, by ranks that do not know these.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import roundtrip
import torch
from cases import Inputs, InternodeCase, direct
from roundtrip import check, run_case, verify
from schedules import run_seeds

import deep_comm
from deep_comm import local
from deep_comm.errors import ConfigMismatch
from deep_comm.reference import internode as reference_internode
from deep_comm.reference import owner_of_expert

SHAPES = [(2, 3), (2, 4), (3, 3)]  # nodes, ranks per node

pytestmark = pytest.mark.usefixtures("poison")


def case_of(shape: tuple[int, int], seed: int = 0, **changes: Any) -> InternodeCase:
    num_ranks = shape[0] * shape[1]
    settings: dict[str, Any] = dict(
        hidden=32, experts=2 * num_ranks + 1, topk=6, routing="holes", biases=seed % 3, calls=2,
        num_sms=4, send_chunk=1, slots=2, rail_chunk=1, rail_slots=2, nvl_bytes=1 << 19,
        rdma_bytes=1 << 18, direct_bytes=0, by_selections=True, fused_layout=seed % 2 == 0,
    )  # fmt: skip
    tokens = tuple((11, 4, 0, 9, 13, 1)[(rank + seed) % 6] for rank in range(num_ranks))
    return InternodeCase(tokens, ranks_per_node=shape[1], seed=seed, **settings | changes)


def with_room(case: InternodeCase) -> InternodeCase:
    return direct(dataclasses.replace(case, nvl_bytes=6 << 20, rdma_bytes=16 << 20))


@pytest.fixture(params=["rings", "a slot for every row"])
def room(request: pytest.FixtureRequest) -> Any:
    return with_room if request.param != "rings" else lambda case: case


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_of_a_node_are_added_by_selections(
    shape: tuple[int, int], room: Any, way: str
) -> None:
    for seed, routing in enumerate(("random", "holes", "duplicates")):
        check(room(case_of(shape, seed, routing=routing)))


def test_eight_ranks_a_node(room: Any) -> None:
    check(room(case_of((2, 8), 1, topk=10)))


def test_more_selections_than_a_warp_has_lanes(room: Any) -> None:
    check(room(case_of((2, 4), 2, topk=48, experts=64)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_that_select_nothing_on_their_own_rank(
    shape: tuple[int, int], room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = roundtrip.make_inputs

    def elsewhere(case: Any, rank: int, call: int) -> Inputs:
        inputs = plain(case, rank, call)
        is_own = owner_of_expert(inputs.topk_idx, case.experts, case.num_ranks) == rank
        return dataclasses.replace(inputs, topk_idx=torch.where(is_own, -1, inputs.topk_idx))

    monkeypatch.setattr(roundtrip, "make_inputs", elsewhere)
    check(room(case_of(shape, 1)))


def simulated_case(seed: int) -> InternodeCase:
    choose = random.Random(seed)
    case = case_of(choose.choice(SHAPES), seed, topk=choose.choice((3, 6)), calls=1)
    return direct(dataclasses.replace(case, rdma_bytes=1 << 20)) if seed % 2 else case


def test_every_schedule_gives_the_same_bits() -> None:
    run_seeds(range(24), simulated_case, run_case, verify)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ascending_ranks_would_give_other_bits(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: of sums alone, as nodes are still added by selections."""
    plain = reference_internode.turns_of_selections

    def ascending(owner: torch.Tensor, num_owners: int) -> Any:
        is_of_ranks = num_owners == shape[0] * shape[1]
        return [(r, None) for r in range(num_owners)] if is_of_ranks else plain(owner, num_owners)

    monkeypatch.setattr(reference_internode, "turns_of_selections", ascending)
    with pytest.raises(AssertionError, match="combined_x"):
        check(case_of(shape))


@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_all_ranks_of_larger_nodes_give_selections_or_none(ranks_per_node: int) -> None:
    num_ranks = 2 * ranks_per_node

    def fn(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 18, 1 << 18, device="cpu", ranks_per_node=ranks_per_node
        ) as buffer:
            x = torch.ones(4, 64, dtype=torch.bfloat16)
            idx = torch.arange(8).view(4, 2) % num_ranks
            recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=num_ranks)

            def call(gives: bool) -> None:
                buffer.combine(recv_x, handle, topk_idx=idx if gives else None)

            if ranks_per_node == 2:
                return call(group.rank() == 1)
            with pytest.raises(ConfigMismatch, match="the operation"):
                call(group.rank() == 1)
            group.barrier()  # a rank that has not come yet would take the next call for this one
            call(gives=True)  # the Buffer stays usable

    local.run(fn, num_ranks, timeout_s=60)
