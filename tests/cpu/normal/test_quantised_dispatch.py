"""dispatch with use_fp8: equal to quantising first and dispatching the result, bit for bit."""

import dataclasses
import random
from typing import Any

import matrix
import pytest
import quantised
import torch
from cases import Case
from on_buffers import on_buffers
from quantised import FORMS, Form, Formed, check, check_processes
from run_by import run_by
from schedules import run_seeds
from test_simulated_end_to_end import small_case

from deep_comm import Buffer, local
from deep_comm.errors import ArgumentError, ConfigMismatch, HandleMismatch

HIDDEN = [128, 256, 384, 640, 1024, 2176]

pytestmark = pytest.mark.usefixtures("poison")


def sample(num_cases: int, seed: int, **fixed: Any) -> list[Formed]:
    cases = matrix.sample(
        num_cases, seed, hidden=HIDDEN, payload=[(torch.bfloat16, None)], alignment=[1, 16, 128],
        **fixed,
    )  # fmt: skip
    return [Formed(case, FORMS[number % len(FORMS)]) for number, case in enumerate(cases)]


@pytest.mark.parametrize(("case", "form"), sample(30, seed=7), ids=str)
def test_rows_are_cast_once_and_bit_for_bit(case: Case, form: Form) -> None:
    check(Formed(case, form))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("direct_bytes", [0, 8 << 20])
def test_rows_in_pieces(form: Form, direct_bytes: int) -> None:
    """Pieces in rings need not end where a block of 128 columns does."""
    case = Case(
        (13, 0, 22, 8), hidden=2176, experts=12, topk=5, num_sms=4, alignment=8,
        direct_bytes=direct_bytes, smem_bytes=20000,
    )  # fmt: skip
    check(Formed(case, form))


def test_every_schedule_gives_the_same_bits() -> None:
    def sampled(seed: int) -> Formed:
        choose = random.Random(seed + 99)
        case = dataclasses.replace(
            small_case(seed), hidden=choose.choice((128, 384, 640)), scales=None,
            dtype=torch.bfloat16, nvl_bytes=1 << 20, smem_bytes=choose.choice((None, 20000)),
            direct_bytes=choose.choice((0, 1 << 13, 1 << 19, 1 << 19)),
        )  # fmt: skip
        return Formed(case, choose.choice(FORMS))

    run_seeds(range(180), sampled, quantised.run_case, quantised.verify)


def test_processes_over_shared_memory() -> None:
    check_processes(sample(6, seed=8, ranks=[3]))


@pytest.mark.parametrize("num_rows, num_columns", [(0, 3), (5, 2), (32, 16), (70, 35), (400, 17)])
@run_by(on_buffers, 1, 1 << 20)
def test_given_scales_come_back_column_by_column(
    buffer: Buffer, /, num_rows: int, num_columns: int
) -> None:
    x = torch.ones(num_rows, 64, dtype=torch.float8_e4m3fn)
    scales = torch.arange(float(num_rows * num_columns)).view(num_rows, num_columns)
    idx = torch.zeros(num_rows, 1, dtype=torch.int64)
    (_, received), *_ = buffer.dispatch(
        (x, scales), topk_idx=idx, num_experts=1, column_major_scales=True
    )
    assert received.stride() == (1, max(4, (num_rows + 3) // 4 * 4))
    assert torch.equal(received, scales)


@pytest.mark.parametrize("num_direct_bytes", [0, 1 << 19], ids=["rings", "region"])
@pytest.mark.parametrize("option", ["round_scale", "use_ue8m0"])
@run_by(local.run, 2)
def test_all_ranks_must_quantise_alike(
    group: local.ThreadGroup, /, option: str, num_direct_bytes: int
) -> None:
    x = torch.ones(5, 128, dtype=torch.bfloat16)  # as many bytes of scales in all formats
    idx = torch.zeros(5, 1, dtype=torch.int64)
    scales = {"round_scale": True, option: group.rank() == 0}
    with Buffer(group, 1 << 20, device="cpu", num_direct_bytes=num_direct_bytes) as buffer:
        with pytest.raises(ConfigMismatch):
            buffer.dispatch(x, topk_idx=idx, num_experts=2, use_fp8=True, **scales)


@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["node", "nodes"])
def test_refusals(ranks_per_node: int | None) -> None:
    def main(buffer: Buffer) -> None:
        x = torch.ones(5, 128, dtype=torch.bfloat16)
        given: dict[str, Any] = dict(topk_idx=torch.zeros(5, 1, dtype=torch.int64), num_experts=2)
        handle = buffer.dispatch(x, **given, use_fp8=True)[4]
        before = buffer.runtime.num_launches
        for bad, match, options in (
            (x, "round_scale", dict(round_scale=True)),
            (x, "use_ue8m0", dict(use_fp8=True, use_ue8m0=True)),
            (x, "column_major_scales", dict(column_major_scales=True)),
            (x.float(), "bfloat16", dict(use_fp8=True)),
            (x[:, :64].contiguous(), "multiple of 128", dict(use_fp8=True)),
            ((x, torch.ones(5, 1)), "without scales", dict(use_fp8=True)),
        ):
            with pytest.raises(ArgumentError, match=match):
                buffer.dispatch(bad, **given, **options)
        with pytest.raises(HandleMismatch, match="5 tokens"):
            buffer.dispatch(x[:4], handle=handle, use_fp8=True)
        assert buffer.runtime.num_launches == before

    on_buffers(main, 2, 1 << 20, 1 << 20, ranks_per_node=ranks_per_node)
