"""Ranks that share one GPU in turns and do not agree, do not come, or are in a Buffer twice."""

import pytest
import torch
from disagreeing import (
    build_alone,
    call_different_operations,
    enter_from_a_second_thread,
    give_different_dtypes,
)
from gpu_cases import run

# Ranks that share a GPU wait for one another's turns.
TIMEOUT_S = 1.5


def on_one_device(fn, num_ranks: int, *args: object) -> list:
    device = torch.device("cuda", 0)
    return run(fn, num_ranks, device, *args, devices=[0] * num_ranks)


def test_ranks_that_call_different_operations_are_told_which() -> None:
    on_one_device(call_different_operations, 2, 1, None, TIMEOUT_S)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_ranks_of_two_nodes_that_call_different_operations_are_told_which(
    ranks_per_node: int,
) -> None:
    num_ranks = 2 * ranks_per_node
    on_one_device(call_different_operations, num_ranks, num_ranks - 1, ranks_per_node, TIMEOUT_S)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_ranks_that_give_different_dtypes_are_told_which(ranks_per_node: int | None) -> None:
    on_one_device(give_different_dtypes, 2, 1, ranks_per_node)


def test_two_threads_cannot_be_in_one_buffer() -> None:
    assert on_one_device(enter_from_a_second_thread, 2) == [[2, 2, 2], [2, 2, 0]]


@pytest.mark.filterwarnings("ignore:.*share")
def test_a_rank_that_builds_no_buffer_is_named_within_the_deadline() -> None:
    for seconds in on_one_device(build_alone, 3):
        assert max(seconds) < 2.4
