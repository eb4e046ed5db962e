"""test_expand.py on one GPU, whose ranks are processes that share it in turns."""

import dataclasses
import functools

import matrix
import pytest
import torch
from cases import Case
from checked_runs import EXPANDED, check
from gpu_cases import run
from graph_bodies import captured

import deep_comm


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_expert_gets_its_rows_and_every_token_its_sum(num_ranks: int) -> None:
    cases = [
        dataclasses.replace(case, nvl_bytes=128 << 20)
        for case in matrix.sample(12, 50 + num_ranks, ranks=[num_ranks], alignment=[1, 16, 128])
    ]
    check(functools.partial(run, devices=[0] * num_ranks), EXPANDED, cases)


def _captured(group) -> list[bool]:
    """A graph of the sums and the combine beside them; the rows change between replays."""
    device = torch.device("cuda", 0)
    num_experts, num_topk, hidden = 12, 4, 1024
    with deep_comm.Buffer(group, 128 << 20, device=device, timeout_s=60) as buffer:
        torch.manual_seed(group.rank())
        x = torch.randn(193, hidden, device=device).bfloat16()
        weights, idx = torch.rand(len(x), num_experts, device=device).topk(num_topk)
        rows, _, row_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=num_experts, expand=True
        )
        y = torch.empty_like(rows)

        def combine() -> torch.Tensor:
            return buffer.combine(y, handle, topk_weights=row_weights, apply_weights=True)[0]

        combine()
        graph, got = captured(combine, group)
        same = []
        for _ in range(4):
            y.normal_()
            got.zero_()
            graph.replay()
            replayed = got.clone()
            same.append(torch.equal(combine(), replayed))
        torch.cuda.synchronize()
        group.barrier()
        return same


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_graph_of_an_expanded_combine_has_the_same_bits(num_ranks: int) -> None:
    assert run(_captured, num_ranks, devices=[0] * num_ranks) == [[True] * 4] * num_ranks


@pytest.mark.parametrize("tokens", [(4100,), (2051, 700)], ids=str)
def test_rows_are_copied_while_others_land(tokens: tuple[int, ...]) -> None:
    """With default SMs the copies run beside the dispatch; with a Config behind it."""
    case = Case(
        tokens, hidden=2048, experts=8, topk=4, alignment=128, calls=3, fused_layout=True,
        nvl_bytes=512 << 20,
    )  # fmt: skip
    cases = [case, dataclasses.replace(case, worst=5)]
    check(functools.partial(run, devices=[0] * len(tokens)), EXPANDED, cases)
