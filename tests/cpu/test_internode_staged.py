"""Combine between nodes with a slot for every row and sum, bit for bit; ranks are threads."""

import dataclasses

import pytest
from internode import InternodeCase, random_case, run_case, verify

from deep_comm import local


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")


def with_room(case: InternodeCase) -> InternodeCase:
    return dataclasses.replace(case, nvl_bytes=6 << 20, direct_bytes=4 << 20)


def check(case: InternodeCase) -> None:
    verify(case, local.run(lambda group: run_case(group, case), case.num_ranks, timeout_s=120))


@pytest.mark.parametrize(
    "case", [with_room(random_case(seed)) for seed in range(300, 396)], ids=str
)
def test_every_token_gets_its_sums(case: InternodeCase) -> None:
    check(case)


@pytest.mark.parametrize(
    "case", [with_room(random_case(seed)) for seed in range(400, 432)], ids=str
)
def test_sums_stored_into_near_nodes_are_the_same(
    case: InternodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "1")
    check(case)
