"""Combined rows have the bits of each release's reference: V1's and V2's orders of sums, written
out token by token, on rows whose sums show the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_comm import local
from deep_comm.compat.elastic import ElasticBuffer
from deep_comm.compat.legacy import Buffer

pytestmark = pytest.mark.usefixtures("on_the_host")

HIDDEN, EXPERTS_PER_RANK, TOPK = 64, 3, 6


@dataclass(frozen=True)
class BitsCase:
    num_ranks: int
    ranks_per_node: int | None = None
    num_biases: int = 0
    expand: bool = False
    multiple: bool = True  # allow_multiple_reduction
    hybrid: bool = True
    sync: bool = True

    @property
    def num_experts(self) -> int:
        return EXPERTS_PER_RANK * self.num_ranks

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // (self.ranks_per_node or self.num_ranks)


def noise(generator: torch.Generator, *shape: int) -> Tensor:
    """Rows whose small elements are lost beside large ones, unless those cancel first."""
    large = torch.randint(-1, 2, shape, generator=generator) * 2.0**25
    return (torch.randn(*shape, generator=generator) + large).to(torch.bfloat16)


def inputs(case: BitsCase, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(topk_idx [T, K], an output of each selection's expert [T, K, H], biases)"""
    generator = torch.Generator().manual_seed(rank + 5)
    num_tokens = (9, 4, 0, 13, 7, 3, 1, 20, 5)[rank]
    scores = torch.rand(num_tokens, case.num_experts, generator=generator)
    idx = scores.topk(min(TOPK, case.num_experts)).indices
    idx = torch.where(torch.rand(idx.shape, generator=generator) < 0.2, -1, idx)
    outputs = noise(generator, *idx.shape, HIDDEN)
    return idx, outputs, [noise(generator, num_tokens, HIDDEN) for _ in range(case.num_biases)]


def added(rows: Sequence[Tensor], start: Sequence[Tensor] = ()) -> Tensor:
    """One float32 sum, rounded once."""
    total = torch.zeros(HIDDEN)
    for row in [*start, *rows]:
        total += row.float()
    return total.to(torch.bfloat16)


Group = tuple[int, Tensor]  # (the selection that it counts at, its sum)


def grouped(groups: Sequence[Group], key: Any) -> list[Group]:
    """Sums of those of one key, rounded, each at its last selection; in the order of these."""
    by_key: dict[Any, list[Group]] = {}
    for k, row in groups:
        by_key.setdefault(key(k), []).append((k, row))
    return sorted(
        ((members[-1][0], added([row for _, row in members])) for members in by_key.values()),
        key=lambda group: group[0],
    )


def v2_sum(case: BitsCase, owners: list[int], rows: list[Group], biases: list[Tensor]) -> Tensor:
    ranks_per_node = case.ranks_per_node or case.num_ranks
    reduces_rank = case.multiple or not case.expand
    if reduces_rank:
        rows = grouped(rows, lambda k: owners[k])
    if reduces_rank and case.multiple and case.hybrid and case.num_nodes > 1:
        rows = grouped(rows, lambda k: owners[k] // ranks_per_node)
    return added([row for _, row in rows], biases)


def v2_sum_of_ascending_ranks(
    case: BitsCase, owners: list[int], rows: list[Group], biases: list[Tensor]
) -> Tensor:
    """V2's, but for the order in a node."""
    assert case.ranks_per_node is not None
    rows = sorted(grouped(rows, lambda k: owners[k]), key=lambda group: owners[group[0]])
    last = {owners[k] // case.ranks_per_node: k for k in sorted(k for k, _ in rows)}
    nodes: dict[int, list[Tensor]] = {}
    for k, row in rows:
        nodes.setdefault(owners[k] // case.ranks_per_node, []).append(row)
    return added([added(nodes[node]) for node in sorted(nodes, key=last.__getitem__)], biases)


def wanted(case: BitsCase, rank: int, total: Any) -> Tensor:
    idx, outputs, biases = inputs(case, rank)
    sums = []
    for token, selections in enumerate(idx.tolist()):
        owners = [expert // EXPERTS_PER_RANK for expert in selections]
        rows = [(k, outputs[token, k]) for k, expert in enumerate(selections) if expert >= 0]
        sums.append(total(case, owners, rows, [bias[token] for bias in biases]))
    return torch.stack(sums) if sums else torch.zeros(0, HIDDEN, dtype=torch.bfloat16)


def fill_rows(case: BitsCase, rank: int, handle: Any, num_rows: int) -> Tensor:
    """What this rank's experts return, from where the handle says that rows are whose."""
    metadata = handle.recv_src_metadata
    local_experts = range(EXPERTS_PER_RANK * rank, EXPERTS_PER_RANK * (rank + 1))
    rows = torch.full((num_rows, HIDDEN), float("nan"), dtype=torch.bfloat16)
    for row in range(int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])):
        source, token = divmod(int(metadata[row, 0]), handle.num_max_tokens_per_rank)
        idx, outputs, _ = inputs(case, source)
        here = [k for k, expert in enumerate(idx[token].tolist()) if expert in local_experts]
        if case.expand:
            for k in here:
                rows[metadata[row, 2 + k]] = outputs[token, k]
        else:
            rows[row] = added([outputs[token, k] for k in here])
    return rows


def elastic(group: Any, case: BitsCase) -> Tensor:
    rank = group.rank()
    idx, _, biases = inputs(case, rank)
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=20, hidden=HIDDEN, num_topk=TOPK,
        allow_hybrid_mode=case.hybrid, allow_multiple_reduction=case.multiple,
    )  # fmt: skip
    x = torch.zeros(len(idx), HIDDEN, dtype=torch.bfloat16)
    weights = torch.rand(idx.shape)
    recv_x, _, recv_weights, handle, _ = buffer.dispatch(
        x, idx, weights, num_experts=case.num_experts, do_expand=case.expand, do_cpu_sync=case.sync
    )
    bias = (None, biases[0] if biases else None, tuple(biases))[case.num_biases]
    rows = fill_rows(case, rank, handle, recv_x.shape[0])
    for _ in range(2):  # the second one finds what the first has made
        combined, combined_weights, _ = buffer.combine(rows, handle, recv_weights, bias)
    assert combined_weights.equal(torch.where(idx >= 0, weights, 0.0))
    without_weights, none, _ = buffer.combine(rows, handle, bias=bias)
    assert none is None and without_weights.equal(combined)
    group.barrier()
    buffer.destroy()
    return combined


ONE_TIER = [
    BitsCase(ranks, num_biases=biases, expand=expand, multiple=multiple, sync=sync)
    for ranks, biases, sync in (
        (1, 1, True),
        (2, 2, True),
        (3, 0, True),
        (4, 1, False),
        (8, 2, True),
    )
    for expand, multiple in ((False, True), (True, True), (True, False), (False, False))
]
TWO_TIERS = [
    BitsCase(ranks, per_node, biases, expand, multiple, hybrid, sync)
    for ranks, per_node, biases, sync in (
        (3, 1, 0, True),
        (4, 2, 1, True),
        (6, 2, 2, False),
        (6, 3, 0, True),
        (8, 4, 2, True),
        (9, 3, 1, False),
    )
    for expand, multiple in ((False, True), (True, True), (True, False), (False, False))
    for hybrid in (True, False)
]


@pytest.mark.parametrize("case", ONE_TIER + TWO_TIERS, ids=str)
def test_sums_of_v2(case: BitsCase, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.ranks_per_node:
        monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(case.ranks_per_node))
    results = local.run(lambda group: elastic(group, case), case.num_ranks, timeout_s=60)
    for rank, combined in enumerate(results):
        assert torch.equal(combined, wanted(case, rank, v2_sum)), f"rank {rank}"


def v1_sum(case: BitsCase, owners: list[int], rows: list[Group], biases: list[Tensor]) -> Tensor:
    by_rank = sorted(grouped(rows, lambda k: owners[k]), key=lambda group: owners[group[0]])
    return added([row for _, row in by_rank], biases)


def biases_last(case: BitsCase, owners: list[int], rows: list[Group], biases: Any) -> Tensor:
    return added([*(row for _, row in grouped(rows, lambda k: owners[k])), *biases])


def legacy(group: Any, case: BitsCase) -> Tensor:
    rank = group.rank()
    idx, _, biases = inputs(case, rank)
    buffer = Buffer(group, 64 << 20)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, case.num_experts)
    x = torch.zeros(len(idx), HIDDEN, dtype=torch.bfloat16)
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=mask,
        topk_idx=idx, topk_weights=torch.rand(idx.shape),
    )  # fmt: skip
    ends, rows = handle[0][:, rank].tolist(), []
    local_experts = range(EXPERTS_PER_RANK * rank, EXPERTS_PER_RANK * (rank + 1))
    for row, token in enumerate(handle[3].tolist()):
        source = sum(end <= row for end in ends)
        chosen, outputs, _ = inputs(case, source)
        here = [k for k, expert in enumerate(chosen[token].tolist()) if expert in local_experts]
        rows.append(added([outputs[token, k] for k in here]))
    y = torch.stack(rows) if rows else recv_x
    bias = (None, biases[0] if biases else None, tuple(biases))[case.num_biases]
    combined, _, _ = buffer.combine(y, handle, bias=bias)
    group.barrier()
    buffer.destroy()
    return combined


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_sums_of_v1(num_ranks: int, num_biases: int) -> None:
    case = BitsCase(num_ranks, num_biases=num_biases)
    results = local.run(lambda group: legacy(group, case), num_ranks, timeout_s=60)
    for rank, combined in enumerate(results):
        assert torch.equal(combined, wanted(case, rank, v1_sum)), f"rank {rank}"


def test_the_rows_show_every_order() -> None:
    """The negative control: none of these sums passes for another."""
    case = BitsCase(4, num_biases=1)
    nodes, large = BitsCase(4, 2, num_biases=1), BitsCase(6, 3)
    ways = [
        (case, v1_sum), (case, v2_sum), (case, biases_last),
        (BitsCase(4, num_biases=1, expand=True, multiple=False), v2_sum), (nodes, v2_sum),
    ]  # fmt: skip
    sums = [torch.cat([wanted(case, rank, total) for rank in range(4)]) for case, total in ways]
    for first in range(len(sums)):
        for second in range(first):
            assert not torch.equal(sums[first], sums[second]), (first, second)
    for case, differs in ((nodes, False), (large, True)):
        ways = v2_sum, v2_sum_of_ascending_ranks
        one, other = (torch.cat([wanted(case, r, way) for r in range(4)]) for way in ways)
        assert torch.equal(one, other) != differs
