"""The reference itself, against definitions written out as loops."""

from __future__ import annotations

import itertools

import pytest
import torch

from deep_comm import reference
from deep_comm.ranks.topology import first_expert, num_local_experts

RANKS, EXPERTS, TOPK, HIDDEN = 5, 13, 4, 16
TOKENS = (7, 0, 40, 1, 12)


def _owner(expert: int, num_experts: int, num_ranks: int) -> int | None:
    if not 0 <= expert < num_experts:
        return None
    return next(
        rank
        for rank in range(num_ranks)
        if first_expert(rank, num_experts, num_ranks)
        <= expert
        < first_expert(rank, num_experts, num_ranks)
        + num_local_experts(rank, num_experts, num_ranks)
    )


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(7)
    xs = [torch.randn(t, HIDDEN, generator=generator).to(torch.bfloat16) for t in TOKENS]
    # -1, indices past the end and repeated experts are in.
    idx = [torch.randint(-2, EXPERTS + 2, (t, TOPK), generator=generator) for t in TOKENS]
    weights = [torch.rand(t, TOPK, generator=generator) for t in TOKENS]
    return xs, idx, weights


@pytest.mark.parametrize(
    ("num_experts", "num_ranks"), list(itertools.product((1, 3, 8, 13), (1, 3, 8)))
)
def test_experts_are_contiguous_and_all_owned(num_experts: int, num_ranks: int) -> None:
    owned = []
    for rank in range(num_ranks):
        first = first_expert(rank, num_experts, num_ranks)
        owned += range(first, first + num_local_experts(rank, num_experts, num_ranks))
    assert owned == list(range(num_experts))
    counts = [num_local_experts(rank, num_experts, num_ranks) for rank in range(num_ranks)]
    assert counts == sorted(counts, reverse=True) and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("num_ranks", [1, 3, 5, 8])
def test_layout_counts_tokens_once_per_rank_and_selections_per_expert(
    num_ranks: int, inputs
) -> None:
    idx = inputs[1][2]
    layout = reference.get_dispatch_layout(idx, EXPERTS, num_ranks)
    per_expert = [0] * EXPERTS
    for token, row in enumerate(idx.tolist()):
        owners = {_owner(expert, EXPERTS, num_ranks) for expert in row} - {None}
        assert layout.is_token_in_rank[token].nonzero().flatten().tolist() == sorted(owners)
        for expert in row:
            if 0 <= expert < EXPERTS:
                per_expert[expert] += 1
    assert layout.num_tokens_per_expert.tolist() == per_expert
    assert layout.num_tokens_per_rank.tolist() == layout.is_token_in_rank.sum(0).tolist()
    assert layout.num_tokens_per_rdma_rank is None


def test_layout_counts_tokens_once_per_node(inputs) -> None:
    layout = reference.get_dispatch_layout(inputs[1][2], EXPERTS, 6, ranks_per_node=2)
    nodes = layout.is_token_in_rank.view(-1, 3, 2).any(2).sum(0)
    assert layout.num_tokens_per_rdma_rank.tolist() == nodes.tolist()


@pytest.mark.parametrize("num_channels", [1, 3, 16])
def test_dispatch_is_sorted_by_source_rank_and_token(num_channels: int, inputs) -> None:
    xs, idx, weights = inputs
    results = reference.dispatch(
        xs, idx, EXPERTS, weights, num_channels=num_channels, expert_alignment=4
    )
    for rank, result in enumerate(results):
        row = 0
        per_expert = [0] * num_local_experts(rank, EXPERTS, RANKS)
        for source in range(RANKS):
            block = row
            for token in range(TOKENS[source]):
                experts = idx[source][token].tolist()
                if rank not in {_owner(expert, EXPERTS, RANKS) for expert in experts}:
                    continue
                assert result.recv_src_rank[row] == source and result.recv_src_idx[row] == token
                assert torch.equal(result.recv_x[row], xs[source][token])
                for k, expert in enumerate(experts):
                    if _owner(expert, EXPERTS, RANKS) == rank:
                        local = expert - first_expert(rank, EXPERTS, RANKS)
                        per_expert[local] += 1
                        assert result.recv_topk_idx[row, k] == local
                        assert result.recv_topk_weights[row, k] == weights[source][token, k]
                    else:
                        assert result.recv_topk_idx[row, k] == -1
                        assert result.recv_topk_weights[row, k] == 0
                channel = token // max(1, -(-TOKENS[source] // num_channels))
                start = int(result.recv_channel_prefix_matrix[source, channel])
                assert results[source].send_head[token, rank] == row - block - start
                row += 1
            assert result.rank_prefix_matrix[source, rank] == row
            sent = results[source].channel_prefix_matrix[rank]
            assert sent[-1] == row - block
            assert result.recv_channel_prefix_matrix[source].tolist() == [0, *sent.tolist()[:-1]]
        assert row == result.num_recv_tokens == len(result.recv_x)
        assert result.num_recv_tokens_per_expert == [-(-count // 4) * 4 for count in per_expert]
        heads = result.send_head
        assert torch.equal(heads == -1, ~result.is_token_in_rank)


def test_scales_travel_with_their_rows_whatever_their_strides(inputs) -> None:
    xs, idx, _ = inputs
    # Also a single column whose stride is not 1: torch calls it contiguous.
    for width, pick in ((3, slice(None)), (3, slice(1, 2))):
        scales = [torch.randn(width, len(x)).t()[:, pick] for x in xs]
        _check_scales(xs, idx, scales)


def _check_scales(xs, idx, scales) -> None:
    bytes_ = [torch.randint(0, 255, (len(x), 16), dtype=torch.uint8) for x in xs]
    pairs = list(zip(bytes_, scales, strict=True))
    for result in reference.dispatch(pairs, idx, EXPERTS):
        for row in range(result.num_recv_tokens):
            source, token = int(result.recv_src_rank[row]), int(result.recv_src_idx[row])
            assert torch.equal(result.recv_x_scales[row], scales[source][token])
        assert result.recv_x_scales.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.float16, torch.int8])
def test_any_dtype_is_moved_as_bytes(dtype: torch.dtype, inputs) -> None:
    idx = inputs[1]
    xs = [torch.randint(0, 255, (t, 32), dtype=torch.uint8).view(dtype) for t in TOKENS]
    result = reference.dispatch(xs, idx, EXPERTS)[0]
    assert result.recv_x.dtype == dtype
    source, token = int(result.recv_src_rank[-1]), int(result.recv_src_idx[-1])
    assert torch.equal(result.recv_x[-1].view(torch.uint8), xs[source][token].view(torch.uint8))


def test_worst_case_rows_are_marked(inputs) -> None:
    xs, idx, weights = inputs
    result = reference.dispatch(xs, idx, EXPERTS, weights, num_worst_tokens=100)[0]
    count = result.num_recv_tokens
    assert len(result.recv_x) == 100 and count < 100
    assert result.num_recv_tokens_per_expert == []
    assert (result.recv_topk_idx[count:] == -1).all()
    assert (result.recv_topk_weights[count:] == 0).all()
    assert (result.recv_src_idx[count:] == -1).all()


@pytest.mark.parametrize("by_selections", [False, True])
@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_combine_adds_biases_then_ranks_in_order_and_rounds_once(
    num_biases: int, by_selections: bool, inputs
) -> None:
    xs, idx, weights = inputs
    results = reference.dispatch(xs, idx, EXPERTS, weights)
    generator = torch.Generator().manual_seed(3)

    def noise(num_rows: int) -> torch.Tensor:
        """What is lost beside a large number is there if those cancel first."""
        shape = (num_rows, HIDDEN)
        large = torch.randint(-1, 2, shape, generator=generator) * 2.0**25
        return (torch.randn(shape, generator=generator) + large).to(torch.bfloat16)

    outputs = [noise(len(result.recv_x)) for result in results]
    parts = [[noise(num_tokens) for _ in range(2)] for num_tokens in TOKENS]
    biases = [{0: None, 1: p[0], 2: (p[0], p[1])}[num_biases] for p in parts]
    combined = reference.combine(
        outputs, results, [r.recv_topk_weights for r in results], biases,
        idx if by_selections else None, EXPERTS,
    )  # fmt: skip
    num_unlike = torch.zeros(2)  # elements that other orders would give other bits
    for source in range(RANKS):
        for token in range(TOKENS[source]):
            owners = [_owner(int(expert), EXPERTS, RANKS) for expert in idx[source][token]]
            ranks = sorted(set(owners) - {None})
            if by_selections:
                ranks.sort(key=lambda rank: max(k for k, o in enumerate(owners) if o == rank))
            received = []
            for rank in ranks:
                result = results[rank]
                hit = (result.recv_src_rank == source) & (result.recv_src_idx == token)
                (row,) = hit.nonzero().flatten().tolist()
                received.append((outputs[rank][row], result.recv_topk_weights[row]))
            biases_of_token = [part[token] for part in parts[source][:num_biases]]

            def total(rows):
                result = torch.zeros(HIDDEN)
                for row in rows:
                    result += row.float()
                return result.to(torch.bfloat16)

            rows = [row for row, _ in received]
            want = total([*biases_of_token, *rows])
            assert torch.equal(combined[source][0][token], want)
            weights_of_token = sum((given for _, given in received), torch.zeros(TOPK))
            assert torch.equal(combined[source][1][token], weights_of_token)
            num_unlike[0] += (total([*biases_of_token, *rows[::-1]]) != want).sum()
            num_unlike[1] += (total([*rows, *biases_of_token]) != want).sum()
    assert num_unlike[0] > 0 and (num_unlike[1] > 0) == (num_biases > 0)


def test_a_token_sent_nowhere_gives_zeros_or_its_bias() -> None:
    xs = [torch.ones(2, 8), torch.ones(1, 8)]
    idx = [torch.full((2, 1), -1), torch.full((1, 1), -1)]
    results = reference.dispatch(xs, idx, 4)
    outputs = [r.recv_x for r in results]
    assert torch.equal(reference.combine(outputs, results)[0][0], torch.zeros(2, 8))
    bias = [torch.full((2, 8), 3.0), None]
    assert torch.equal(reference.combine(outputs, results, None, bias)[0][0], bias[0])


def test_moe_layer_is_the_weighted_sum_of_the_experts(inputs) -> None:
    _, idx, weights = inputs
    xs = [torch.randint(-8, 8, (t, HIDDEN)).float() for t in TOKENS]
    weights = [(w * 8).round() / 8 for w in weights]  # exact in any order
    outputs = reference.moe_layer(
        xs, idx, weights, EXPERTS, lambda expert, rows: rows * (expert + 1)
    )
    for rank, x in enumerate(xs):
        valid = (idx[rank] >= 0) & (idx[rank] < EXPERTS)
        factor = torch.where(valid, weights[rank] * (idx[rank] + 1), 0.0).sum(1, keepdim=True)
        assert torch.equal(outputs[rank], x * factor)
