"""Two tiers under seeded schedules: late and reordered puts, rows stored into near nodes, weak
memory; and faults that must be found. Through rings; to final places, every row with a slot of its
own ("direct"); and combine with a slot for every row and sum ("staged").
"""

import dataclasses
import random
from collections.abc import Callable

import cases
import found_seeds
import pytest
import torch
from cases import ROUTINGS, InternodeCase, Scales
from roundtrip import buffer_of, call_once, run_case, verify
from schedules import find_fault, pass_without_fault, run_seeds, simulated

from deep_comm import simulate
from deep_comm.backends import cpu

SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (2, 1), (3, 2)]

pytestmark = pytest.mark.usefixtures("poison")


def small_case(seed: int) -> InternodeCase:
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    num_ranks = num_nodes * ranks_per_node
    slots, rail_slots = choose.choice((1, 2, 3)), choose.choice((2, 3, 5))
    return InternodeCase(
        tuple(choose.choice((0, 1, 3, 6, 9)) for _ in range(num_ranks)),
        hidden=choose.choice((16, 32, 48)), experts=choose.choice((num_ranks, 2 * num_ranks + 1)),
        topk=choose.choice((1, 2, 4)), dtype=choose.choice((torch.bfloat16, torch.uint8)),
        scales=choose.choice((None, None, Scales(3, torch.float32, "column"))),
        routing=choose.choice(ROUTINGS), num_sms=choose.choice((2, 2, 4)),
        send_chunk=choose.randint(1, slots), slots=slots,
        rail_chunk=choose.randint(1, rail_slots // 2), rail_slots=rail_slots,
        num_qps=choose.choice((1, 2, 5)), worst=choose.choice((0, 0, 2)),
        biases=choose.choice((0, 1)), fused_layout=choose.choice((False, True)),
        calls=choose.choice((1, 2)), nvl_bytes=1 << 17, rdma_bytes=1 << 18,
        ranks_per_node=ranks_per_node, seed=seed,
    )  # fmt: skip


def direct(case: InternodeCase) -> InternodeCase:
    return cases.direct(dataclasses.replace(case, nvl_bytes=1 << 19, rdma_bytes=1 << 19))


def direct_case(seed: int) -> InternodeCase:
    return direct(small_case(seed))


def staged_case(seed: int) -> InternodeCase:
    choose = random.Random(seed + 33)
    rail_slots = choose.choice((2, 4, 9))
    return dataclasses.replace(
        small_case(seed),
        combine_dtype=choose.choice((torch.bfloat16, torch.bfloat16, torch.float32)),
        rail_chunk=choose.randint(1, rail_slots // 2), rail_slots=rail_slots, nvl_bytes=1 << 19,
        direct_bytes=1 << 18, is_direct=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case_of", "way", "seeds"),
    [
        (small_case, "put", range(240)),
        (small_case, "stored", range(1000, 1080)),
        (direct_case, "put", range(2000, 2120)),
        (direct_case, "stored", range(2000, 2120)),
        (staged_case, "put", range(160)),
        (staged_case, "stored", range(1000, 1040)),
    ],
    indirect=["way"],
)
def test_every_schedule_gives_the_same_bits(
    case_of: Callable[[int], InternodeCase], way: str, seeds: range
) -> None:
    run_seeds(seeds, case_of, run_case, verify)


# Rings of two slots, several calls and unequal ranks give each fault a chance.
FAULTY = InternodeCase(
    (9, 6, 12, 5), experts=4, topk=3, hidden=48, num_sms=2, slots=2, send_chunk=1, calls=2,
    rail_slots=2, rail_chunk=1, nvl_bytes=1 << 17, rdma_bytes=1 << 18, ranks_per_node=2,
)  # fmt: skip
# Chunks of several rows that different blocks fill, two calls, unequal ranks.
SEVERAL = direct(dataclasses.replace(FAULTY, num_sms=4, rail_chunk=2, rail_slots=4))
# One rank per node: where rows are stored, what waits for them handles their metadata alone.
ALONE = dataclasses.replace(SEVERAL, ranks_per_node=1)
# Between nodes is memory for rings alone: dispatch takes those, and faults of combine's own show.
STAGED = dataclasses.replace(SEVERAL, direct_bytes=1 << 18, rdma_bytes=1 << 12, is_direct=False)
# Rows go out behind notify, before the host knows how many come.
EARLY = dataclasses.replace(SEVERAL, calls=3, fused_layout=True)
CASES = {
    ("rings", "put"): FAULTY,
    ("rings", "stored"): FAULTY,
    ("direct", "put"): SEVERAL,
    ("direct", "stored"): SEVERAL,
    ("alone", "put"): ALONE,
    ("alone", "stored"): ALONE,
    ("staged", "put"): STAGED,
    # Where rows are stored, that memory is enough for places, which need no slots to send from.
    ("staged", "stored"): dataclasses.replace(STAGED, is_direct=True),
    ("sums alone", "put"): dataclasses.replace(STAGED, ranks_per_node=1, rdma_bytes=1 << 13),
    ("sums alone", "stored"): dataclasses.replace(
        STAGED, ranks_per_node=1, rdma_bytes=1 << 14, is_direct=True
    ),
    ("early", "put"): EARLY,
    ("early", "stored"): EARLY,
}
FAULTS = {
    ("rings", "put"): [
        "reorder_rail",  # a signal overtakes the rows before it
        "skip_rail_credit",  # slots are filled again before they have been read
        "early_rail_credit",  # credits go back before the reads
        "skip_rail_fence",  # the NIC reads slots whose stores it cannot see yet
        "skip_entry_barrier",  # a kernel writes where peers still run the one before
        "ignore_generation",  # words of the kernel before are taken for this one's
        "weaken_release",
    ],
    ("rings", "stored"): [
        "skip_rail_credit", "early_rail_credit", "skip_entry_barrier", "weaken_release",
    ],
    ("direct", "put"): [
        "reorder_rail",  # the word overtakes the rows
        "skip_rail_fence",  # the NIC reads slots whose stores it cannot see yet
        "skip_bulk_wait",  # rows are told of before they have landed
        "skip_entry_barrier",  # slots and outputs are filled while the kernel before reads them
        "weaken_release",
        "early_rail_done",  # a call could return while its kernel still needs the NIC
        "skip_exit_barrier",  # a call returns before its rows are there
        "ignore_generation",  # words of the kernel before announce this one's rows
        "early_generation",  # a block that begins late is of the next generation
    ],
    ("direct", "stored"): [
        "skip_rail_fence", "skip_bulk_wait", "skip_entry_barrier", "weaken_release",
    ],
    ("alone", "put"): ["skip_rail_fence", "skip_bulk_wait"],
    ("alone", "stored"): [
        "skip_rail_fence",
        "skip_bulk_wait",  # a row is told of before it is in its final row
        "skip_entry_barrier",
        "weaken_release",
        "ignore_generation",  # rows of this kernel where those of the one before belonged
    ],
    ("staged", "put"): [
        "skip_arrival",  # rows and sums are added whether they have come or not
        "reorder_rail",  # the word of a chunk overtakes the sums before it
        "skip_rail_fence",  # the NIC reads sums whose stores it cannot see yet
        "weaken_fence",  # words of rows and sums are not behind them
        "skip_bulk_wait",  # rows are published before they have landed
        "skip_entry_barrier",  # a kernel writes where peers still run the one before
        "ignore_generation",  # words of the kernel before are taken for this one's
        "early_rail_done",  # a call could return while its kernel still needs the NIC
    ],
    ("staged", "stored"): ["skip_arrival", "weaken_fence", "skip_entry_barrier"],
    ("sums alone", "put"): ["skip_arrival", "reorder_rail", "weaken_fence", "skip_bulk_wait"],
    ("sums alone", "stored"): ["skip_arrival", "weaken_fence"],
    ("early", "put"): ["skip_entry_barrier", "skip_bulk_wait", "weaken_release"],
    ("early", "stored"): ["skip_entry_barrier", "skip_bulk_wait", "weaken_release"],
}  # fmt: skip
every_mode = pytest.mark.parametrize(("mode", "way"), CASES, indirect=["way"])


@pytest.mark.parametrize(
    ("mode", "way", "fault"),
    [(*which, fault) for which, faults in FAULTS.items() for fault in faults],
    indirect=["way"],
)
def test_simulation_finds_the_fault(mode: str, way: str, fault: str) -> None:
    find_fault(fault, CASES[mode, way], run_case, verify)


@every_mode
def test_the_same_runs_pass_without_a_fault(mode: str, way: str) -> None:
    pass_without_fault(CASES[mode, way], run_case, verify)


@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
@every_mode
def test_a_rank_that_stalls_for_a_while_changes_nothing(mode: str, way: str, stalled: int) -> None:
    case = CASES[mode, way]
    for seed in range(3):
        verify(case, simulated(case, run_case, seed, stalls=[(stalled, 300 * seed, 4000)]))


def halves_of(case: InternodeCase, seed: int) -> InternodeCase:
    """The same with rows that are too long for a stage in shared memory."""
    return dataclasses.replace(
        case, hidden=512, nvl_bytes=1 << 21, direct_bytes=1 << 20, rdma_bytes=1 << 21,
        smem_bytes=12000, seed=seed,
    )  # fmt: skip


def test_rows_in_pieces_arrive_and_return(way: str) -> None:
    run_seeds(range(3), lambda seed: halves_of(SEVERAL, seed), run_case, verify)


def test_simulation_finds_a_stage_that_is_loaded_while_it_is_read(way: str) -> None:
    find_fault("skip_bulk_wait_read", halves_of(SEVERAL, 0), run_case, verify)


@pytest.mark.parametrize("seed", range(6))
def test_full_rings_on_both_tiers(seed: int) -> None:
    """Enough rows for every role to wait for credit; small cases end before that. Of three slots
    each is filled by combine's two reducing warps in turn.
    """
    case = InternodeCase(
        (40,) * 6, hidden=32, experts=12, topk=4, num_sms=4, send_chunk=1, slots=2, rail_chunk=1,
        rail_slots=2 + seed % 2, nvl_bytes=1 << 18, rdma_bytes=1 << 18, seed=seed,
        ranks_per_node=(2, 3, 1)[seed % 3],
    )  # fmt: skip
    verify(case, simulated(case, run_case, seed))


def test_counts_of_more_experts_than_a_warp_has_lanes() -> None:
    """And of tokens that two blocks count, each of other experts."""
    case = InternodeCase(
        (16, 9, 12, 5), hidden=16, experts=160, topk=3, num_sms=2, slots=4, send_chunk=2,
        rail_slots=4, rail_chunk=2, nvl_bytes=1 << 18, rdma_bytes=1 << 18, ranks_per_node=2,
    )  # fmt: skip
    run_seeds(range(4), lambda seed: dataclasses.replace(case, seed=seed), run_case, verify)


@pytest.mark.parametrize(("tokens", "ranks_per_node"), [((600, 3), 1), ((600, 3, 2, 3), 2)])
def test_more_items_than_the_publisher_is_told_of_at_once(
    tokens: tuple[int, ...], ranks_per_node: int
) -> None:
    """A warp waits until the publisher has read an entry before it fills it again."""
    case = cases.direct(
        InternodeCase(
            tokens, hidden=16, experts=4, topk=2, num_sms=2, slots=2, send_chunk=1, rail_chunk=2,
            rail_slots=4, nvl_bytes=1 << 21, rdma_bytes=1 << 21, ranks_per_node=ranks_per_node,
        )
    )  # fmt: skip
    run_seeds(range(3), lambda seed: dataclasses.replace(case, seed=seed), run_case, verify)


@pytest.fixture
def partly_near(near: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores reach the nodes, but another rank's do not: chunks are those of puts."""
    monkeypatch.setattr(cpu._HostHeap, "stores_reach", lambda heap, peers: False)


# Chunks of four sums, which several blocks fill.
COUNTED = dataclasses.replace(
    STAGED, rail_chunk=4, rail_slots=8, rdma_bytes=1 << 15, is_direct=True
)


@pytest.mark.usefixtures("partly_near")
def test_chunks_that_several_blocks_fill_are_stored_as_one() -> None:
    run_seeds(
        found_seeds.CHUNKS, lambda seed: dataclasses.replace(COUNTED, seed=seed), run_case, verify
    )


@pytest.mark.usefixtures("partly_near")
@pytest.mark.parametrize(
    ("ranks_per_node", "fault"),
    [(2, "skip_rail_fence"), (2, "weaken_fence"), (1, "weaken_fence"), (1, "skip_arrival")],
)
def test_simulation_finds_the_fault_where_some_are_near(ranks_per_node: int, fault: str) -> None:
    case = dataclasses.replace(COUNTED, ranks_per_node=ranks_per_node)
    find_fault(fault, case, run_case, verify)


@pytest.mark.parametrize("without", [0, 3])
def test_all_ranks_take_the_rings_if_one_has_no_room(without: int) -> None:
    """Nothing but memory of its own differs on that rank: it keeps its region's blocks."""

    def fn(group):
        with buffer_of(group, STAGED, "cpu") as buffer:
            kept = None
            if buffer.rank == without:
                kept = buffer._context.region.allocate(STAGED.direct_bytes)
            assert buffer.rank != without or kept is not None
            calls = [call_once(buffer, STAGED, call) for call in range(STAGED.calls)]
            del kept
            return calls

    for seed in range(4):
        verify(STAGED, simulate.run(fn, 4, seed, timeout_s=120))


def test_sixty_four_ranks_of_eight_nodes(way: str) -> None:
    case = InternodeCase(
        (2,) * 64, hidden=16, experts=64, topk=4, num_sms=2, slots=2, send_chunk=1, rail_chunk=1,
        rail_slots=2, ranks_per_node=8, nvl_bytes=1 << 18, direct_bytes=3 << 16, rdma_bytes=1 << 18,
        is_direct=True,
    )  # fmt: skip
    verify(case, simulated(case, run_case, 1))
