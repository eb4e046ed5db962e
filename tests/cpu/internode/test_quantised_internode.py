"""dispatch with use_fp8 over two tiers: equal to quantising first and dispatching the result, bit
for bit and in bytes on the rail; ranks are threads, processes or simulated.
"""

import dataclasses
import random

import pytest
import quantised
import torch
from cases import SHAPES, InternodeCase, direct
from internode import random_case
from on_buffers import on_buffers
from quantised import FORMS, Form, Formed, check, check_processes
from schedules import find_fault, pass_without_fault, run_seeds, simulated, some_of
from test_internode_simulated import small_case

from deep_comm import Buffer
from deep_comm.errors import ConfigMismatch

pytestmark = pytest.mark.usefixtures("poison")

HIDDEN = (128, 256, 384, 640, 1024, 2176)


def bfloat16(case: InternodeCase, seed: int) -> InternodeCase:
    hidden = random.Random(seed).choice(HIDDEN)
    return dataclasses.replace(case, hidden=hidden, dtype=torch.bfloat16, scales=None)


@pytest.mark.parametrize("seed", some_of(range(36)))
def test_rows_are_cast_once_and_bit_for_bit(seed: int) -> None:
    case = bfloat16(random_case(seed), seed)
    check(Formed(direct(case) if seed % 2 else case, FORMS[seed // 2 % len(FORMS)]))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_shape(shape: tuple[int, int]) -> None:
    num_ranks = shape[0] * shape[1]
    case = InternodeCase(
        tuple((7 * rank) % 19 for rank in range(num_ranks)), hidden=640, experts=2 * num_ranks + 3,
        topk=5, routing="skewed", alignment=16, ranks_per_node=shape[1], calls=2, seed=shape[0],
    )  # fmt: skip
    check(Formed(case, Form(round_scale=True, use_ue8m0=True)))
    check(Formed(direct(case), Form()))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("is_direct", [False, True])
def test_rows_in_pieces(form: Form, is_direct: bool) -> None:
    """Stages of 512 columns or few more; the last piece of a row is shorter."""
    case = InternodeCase(
        (13, 0, 22, 8), hidden=2176, experts=12, topk=5, num_sms=4, alignment=8, smem_bytes=24000,
        nvl_bytes=1 << 20, is_direct=is_direct, direct_bytes=(1 << 19) * is_direct,
    )  # fmt: skip
    check(Formed(case, form))


def test_without_room_for_a_stage_rows_take_the_rings() -> None:
    """A stage of BF16 must hold 512 columns; FP8 rows in rings need none."""
    case = InternodeCase((5, 9), hidden=1024, ranks_per_node=1, smem_bytes=12000)
    check(Formed(dataclasses.replace(case, direct_bytes=case.nvl_bytes // 2), Form()))


def test_many_nodes_have_destinations_past_a_warp() -> None:
    case = InternodeCase(
        (3,) * 36, hidden=256, experts=36, topk=8, num_sms=2, slots=2, send_chunk=1, rail_chunk=1,
        rail_slots=2, ranks_per_node=1, nvl_bytes=1 << 20, rdma_bytes=1 << 21,
    )  # fmt: skip
    check(Formed(direct(case), Form()))


def test_processes_over_shared_memory() -> None:
    cases = [
        Formed(bfloat16(random_case(seed, (2, 2)), seed), FORMS[seed % len(FORMS)])
        for seed in range(500, 503)
    ]
    check_processes([*cases, *(Formed(direct(case), form) for case, form in cases)])


# ---- simulated ----------------------------------------------------------------------------------


def sampled(seed: int) -> Formed:
    choose = random.Random(seed + 99)
    case = dataclasses.replace(
        small_case(seed), hidden=choose.choice((128, 384, 640)), dtype=torch.bfloat16, scales=None,
        nvl_bytes=1 << 19, rdma_bytes=1 << 19, smem_bytes=choose.choice((None, 20000)),
    )  # fmt: skip
    form = choose.choice(FORMS)
    return Formed(direct(case) if choose.random() < 0.6 else case, form)


def test_every_schedule_gives_the_same_bits(way: str) -> None:
    run_seeds(range(8000, 8080), sampled, quantised.run_case, quantised.verify)


FORM = Form(round_scale=True, use_ue8m0=True)
RINGS = InternodeCase(
    (9, 6, 12, 5), experts=4, topk=3, hidden=640, num_sms=2, slots=2, send_chunk=1, calls=2,
    rail_slots=2, rail_chunk=1, nvl_bytes=1 << 19, rdma_bytes=1 << 19, ranks_per_node=2,
)  # fmt: skip
PLACES = direct(dataclasses.replace(RINGS, num_sms=4, rail_chunk=2, rail_slots=4, smem_bytes=20000))
ALONE = dataclasses.replace(PLACES, ranks_per_node=1)


@pytest.mark.parametrize(
    ("case", "fault", "near"),
    [
        (RINGS, "reorder_rail", 0),
        (RINGS, "skip_rail_credit", 0),
        (RINGS, "weaken_release", 0),
        (PLACES, "reorder_rail", 0),
        (PLACES, "skip_rail_fence", 0),
        # The stage of half the bytes is read by its stores when the next row is loaded.
        (PLACES, "skip_bulk_wait", 0),
        (PLACES, "skip_bulk_wait", 1),
        (PLACES, "skip_entry_barrier", 1),
        (PLACES, "weaken_release", 1),
        (ALONE, "skip_bulk_wait", 1),
    ],
    ids=lambda value: str(value) if not isinstance(value, InternodeCase) else "",
)
def test_a_protocol_with_a_step_left_out_fails(
    case: InternodeCase, fault: str, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", str(near))
    find_fault(fault, Formed(case, FORM), quantised.run_case, quantised.verify)


@pytest.mark.parametrize("case", [RINGS, PLACES, ALONE], ids=["rings", "places", "alone"])
def test_the_same_runs_pass_without_a_fault(case: InternodeCase, way: str) -> None:
    formed = Formed(case, FORM)
    pass_without_fault(formed, quantised.run_case, quantised.verify, num_seeds=12)


@pytest.mark.parametrize("stalled", [0, 3])
def test_a_rank_that_stalls_for_a_while_changes_nothing(stalled: int, way: str) -> None:
    formed = Formed(PLACES, FORM)
    for seed in range(3):
        stalls = [(stalled, 300 * seed, 4000)]
        quantised.verify(formed, simulated(formed, quantised.run_case, seed, stalls=stalls))


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_bytes", [0, 1 << 19])
def test_all_ranks_must_quantise_alike(direct_bytes: int) -> None:
    def main(buffer: Buffer) -> None:
        x = torch.ones(5, 128, dtype=torch.bfloat16)
        idx = torch.zeros(5, 1, dtype=torch.int64)
        for mine in (dict(round_scale=True), dict(round_scale=True, use_ue8m0=True)):
            options = mine if buffer.rank == 0 else {}
            with pytest.raises(ConfigMismatch, match="round_scale|scale_row_bytes"):
                buffer.dispatch(x, topk_idx=idx, num_experts=2, use_fp8=True, **options)
        with pytest.raises(ConfigMismatch, match="row_bytes"):
            buffer.dispatch(x, topk_idx=idx, num_experts=2, use_fp8=buffer.rank == 0)
        (recv_x, _), *_ = buffer.dispatch(x, topk_idx=idx, num_experts=2, use_fp8=True)
        assert recv_x.shape[0] == (10 if buffer.rank == 0 else 0)

    on_buffers(main, 2, 1 << 20, 1 << 20, ranks_per_node=1, num_direct_bytes=direct_bytes)
