"""Low-latency calls between logical nodes on the host target, as threads and as
processes, over shapes and options.
"""

import random

import forked
import pytest
import torch
from low_latency import (
    LowLatencyCase,
    Pair,
    Range,
    inputs_of,
    on_case,
    open_buffer,
    run_case,
    run_pairs,
    verify,
)
from on_buffers import on_buffers
from schedules import on_threads, run_seeds

import deep_comm
from deep_comm import errors, local

SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (2, 1), (3, 1)]

pytestmark = pytest.mark.usefixtures("poison")


RANGE = Range(
    max_tokens=(1, 2, 7, 16, 40), hidden=(8, 24, 128, 1160), hidden_fp8=(128, 384, 640, 1152),
    experts=(1, 3, 8, 19, 32), topk=(1, 2, 8, 33, 64), topk_one_rounding=(1, 2, 8),
    modes=("plain", "plain", "hook", "late", "async"),
)  # fmt: skip


def sampled_case(seed: int) -> LowLatencyCase:
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    return RANGE.draw(
        choose, num_nodes * ranks_per_node, calls=3, ranks_per_node=ranks_per_node,
        num_qps=choose.choice((1, 2, 24)), hand_on=choose.choice((0, 8, 1000)), seed=seed,
    )  # fmt: skip


def test_every_rank_gets_its_rows_and_sums(way: str) -> None:
    run_seeds(range(42), sampled_case, run_case, verify, on_threads)


def put_bytes(group: local.ThreadGroup, case: LowLatencyCase) -> list[list[int]]:
    """What one call of each kind puts, [dispatch, combine] by node."""
    with open_buffer(group, case) as buffer:
        buffer.runtime.low_latency_hand_on_tokens = case.hand_on
        pair, counted = Pair(buffer, case, 0), []
        for stage in (pair.dispatch, pair.combine):
            before = [sum(queues) for queues in buffer.rail_put_bytes]
            stage()
            now = [sum(queues) for queues in buffer.rail_put_bytes]
            counted.append([a - b for a, b in zip(now, before, strict=True)])
        return counted


@pytest.mark.parametrize("hand_on", [0, 100])
def test_a_row_crosses_once_to_a_node_or_to_each_rank_there_and_never_to_the_own(
    hand_on: int,
    way: str,
) -> None:
    """What is stored counts as if it were put; it goes to each rank, whatever hand_on."""
    case = LowLatencyCase(
        (5, 8, 2, 7), 8, hidden=256, experts=8, topk=3, weights_ahead=True, ranks_per_node=2,
        use_fp8=True, hand_on=hand_on,
    )  # fmt: skip
    got = local.run(lambda group: put_bytes(group, case), 4, timeout_s=60)
    inputs = [inputs_of(case, rank, 0) for rank in range(4)]
    ranks_of = [[{int(e) // 2 for e in row if e >= 0} for row in idx] for _, idx, _ in inputs]
    is_once = hand_on == 0 and way == "put"
    slot, row, counts = 3 * 16 + 4 * 4 + 256 + 2 * 4 + 8, 2 * 256, 2 * (3 + 2) * 8
    for rank, (dispatched, combined) in enumerate(got):
        other = 1 - rank // 2
        assert dispatched[rank // 2] == combined[rank // 2] == 0
        there = [len(ranks & {2 * other, 2 * other + 1}) for ranks in ranks_of[rank]]
        sent = sum(min(num, 1) for num in there) if is_once else sum(there)
        assert dispatched[other] == sent * slot + counts
        returned = sum(
            rank in ranks for peer in (2 * other, 2 * other + 1) for ranks in ranks_of[peer]
        )
        assert combined[other] == returned * row


def test_the_most_tokens_of_any_rank_are_reported_to_all() -> None:
    hint = deep_comm.Buffer.get_low_latency_rdma_size_hint(16, 64, 4, 4, ranks_per_node=2)

    def main(buffer: deep_comm.Buffer) -> int:
        num = (3, 11, 0, 7)[buffer.rank]
        x = torch.zeros(num, 64, dtype=torch.bfloat16)
        idx = torch.zeros(num, 1, dtype=torch.int64)
        stats = torch.zeros(4, dtype=torch.int64)
        total = torch.zeros(1, dtype=torch.int32)
        for _ in range(2):
            buffer.low_latency_dispatch(
                x, idx, 16, 4, total, stats, use_fp8=False, report_num_tokens=True
            )
        assert int(total) == (2 * 21 if buffer.rank == 0 else 0)
        assert (stats >= 0).all()
        return buffer.wait_low_latency_num_tokens()

    assert on_buffers(main, 4, 0, hint, low_latency_mode=True, ranks_per_node=2) == [11] * 4


# ---- errors --------------------------------------------------------------------------------------


def test_a_region_that_is_too_small_names_the_bytes_it_needs() -> None:
    inside = deep_comm.Buffer.get_low_latency_rdma_size_hint(16, 256, 4, 8)
    between = deep_comm.Buffer.get_low_latency_rdma_size_hint(16, 256, 4, 8, ranks_per_node=2)
    assert inside < between < 2 * inside
    assert deep_comm.Buffer.get_low_latency_rdma_size_hint(
        16, 256, 16, 8
    ) == deep_comm.Buffer.get_low_latency_rdma_size_hint(16, 256, 16, 8, ranks_per_node=8)

    def main(buffer: deep_comm.Buffer) -> None:
        x, idx = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(errors.BufferTooSmall, match="num_rdma_bytes"):
            buffer.low_latency_dispatch(x, idx, 16, 8, use_fp8=False)

    on_buffers(main, 4, 0, 1 << 14, low_latency_mode=True, ranks_per_node=2)


def test_ranks_that_disagree_are_told_and_one_reset_helps() -> None:
    case = LowLatencyCase((3, 2, 4, 1), 8, hidden=128, ranks_per_node=2, calls=2)

    def main(buffer: deep_comm.Buffer) -> list:
        x, idx = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int64)
        with pytest.raises((errors.ConfigMismatch, errors.PeerTimeout)):
            buffer.low_latency_dispatch(x, idx, 8 - (buffer.rank == 2), 8, use_fp8=False)
        buffer.group.barrier()
        buffer.reset()
        return run_pairs(buffer, case)

    verify(case, on_case(main, case, timeout_s=2.0))


def test_an_expert_out_of_range_is_reported_and_the_rest_is_sent() -> None:
    hint = deep_comm.Buffer.get_low_latency_rdma_size_hint(4, 64, 2, 2, ranks_per_node=1)

    def main(buffer: deep_comm.Buffer) -> int:
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 1], [1, 0]])
        if buffer.rank == 0:
            idx[1, 0] = 7
            with pytest.raises(errors.ExpertIndexError):
                buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
            return -1
        recv, count, *_ = buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
        return int(count)

    assert on_buffers(main, 2, 0, hint, low_latency_mode=True, ranks_per_node=1) == [-1, 3]


def late_rank(group: object, silent: int) -> str:
    case = LowLatencyCase((3,) * 4, 4, experts=4, topk=4, ranks_per_node=2)
    with open_buffer(group, case, timeout_s=4.0) as buffer:
        pair = Pair(buffer, case, 0)
        pair.dispatch()
        if buffer.rank == silent:
            return "silent"
        with pytest.raises(errors.PeerTimeout) as raised:
            pair.combine()
        assert raised.value.peer == silent
        return "named"


def test_a_silent_process_is_named_on_both_nodes() -> None:
    assert sorted(forked.run(late_rank, 4, 2, timeout_s=200)) == ["named"] * 3 + ["silent"]
