"""Low-latency dispatch that casts rows to NVFP4: bit for bit against the
reference, and what that means.
"""

from __future__ import annotations

import dataclasses
import random

import forked
import pytest
import torch
from low_latency import LowLatencyCase, Range, run_case, verify
from on_buffers import on_buffers
from run_by import run_by
from schedules import on_threads, run_seeds, some_of

import deep_comm
from deep_comm import local, simulate
from deep_comm.reference import low_latency as reference

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

pytestmark = pytest.mark.usefixtures("poison")


RANGE = Range(
    max_tokens=(1, 7, 16, 70),
    hidden=(64, 192, 1088, 2048),
    hidden_fp8=(64, 192, 1088, 2048),  # use_fp8 is not looked at
    experts=(1, 3, 8, 19),
    topk=(1, 2, 8, 33),
)


def sampled_case(seed: int) -> LowLatencyCase:
    choose = random.Random(seed)
    return RANGE.draw(
        choose, choose.choice((1, 2, 3, 4, 8)), use_nvfp4=True, round_scale=False, use_ue8m0=False,
        one_rounding=False, zero_copy=False, calls=3, seed=seed,
    )  # fmt: skip


def check(case: LowLatencyCase) -> None:
    results = local.run(lambda group: run_case(group, case), case.num_ranks, timeout_s=60)
    verify(case, results)


def test_every_rank_gets_its_rows_and_sums() -> None:
    run_seeds(range(40), sampled_case, run_case, verify, on_threads)


def test_ranks_may_be_processes() -> None:
    case = LowLatencyCase((9, 0, 16), 16, hidden=256, topk=3, use_nvfp4=True, calls=3)
    verify(case, forked.run(run_case, 3, case, timeout_s=100))


def test_under_many_schedules() -> None:
    for seed in some_of(range(40)):
        case = LowLatencyCase(
            (3, 0, 4), 4, hidden=64 if seed % 2 else 128, experts=5, topk=3, use_nvfp4=True,
            compact=seed % 3 == 0, mode="hook" if seed % 4 == 0 else "plain", seed=seed,
        )  # fmt: skip
        verify(case, simulate.run(lambda group, case=case: run_case(group, case), 3, seed=seed))


def test_over_two_nodes() -> None:
    for compact in (False, True):
        case = LowLatencyCase(
            (9, 0, 16, 3), 16, hidden=192, topk=3, use_nvfp4=True, compact=compact, calls=3,
            ranks_per_node=2, num_qps=2,
        )  # fmt: skip
        check(case)


def awkward_rows() -> torch.Tensor:
    """Zeros of both signs, halfway cases, what is not finite, what vanishes: [T, 64]."""
    nan, inf = float("nan"), float("inf")
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    blocks = [
        [-0.0] * 16, [0.0] * 16, [-0.0] * 8 + [6.0] + [-0.0] * 7,
        [*halfway, *(-value for value in halfway)], [1.0, nan, -nan] + [-2.0] * 13,
        [1.0, inf, -inf] + [3.0] * 13, [1e-38] * 15 + [-1e-38], [3e38, -3e38] + [1e30] * 14,
    ]  # fmt: skip
    rows = [sum((blocks[(row + column) % 8] for column in range(4)), []) for row in range(8)]
    return torch.tensor(rows).to(torch.bfloat16)


@pytest.mark.parametrize("scale", [None, 1.0, 448.0, 2.0**-9, 1e30])
def test_awkward_numbers_are_cast_as_the_reference_says(scale: float | None) -> None:
    x = awkward_rows()
    factor = None if scale is None else torch.tensor([scale])

    def fn(buffer):
        (rows, tiles), count, handle, _, _ = buffer.low_latency_dispatch(
            x, torch.zeros(len(x), 1, dtype=torch.int64), 8, 1, use_nvfp4=True,
            x_global_scale=factor,
        )  # fmt: skip
        assert rows.dtype == torch.uint8 and rows.shape == (1, 8, 32)
        assert tiles.dtype == torch.float8_e4m3fn and tiles.shape == (1, 1, 1, 32, 4, 4)
        return rows[0], tiles.view(torch.uint8)

    rows, tiles = on_buffers(fn, 1, 0, 1 << 20, low_latency_mode=True)[0]
    expected_rows, expected_scales = reference.quantise_nvfp4(x, factor)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(reference.rows_of_scale_tiles(tiles, 8)[0], expected_scales)


def test_codes_are_the_nearest_numbers_of_e2m1() -> None:
    values = torch.linspace(-7, 7, 4001)
    codes = reference.to_e2m1(values)
    found = E2M1[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    distance = (values.unsqueeze(1).abs() - E2M1).abs()
    assert torch.equal((values - found).abs(), distance.amin(dim=1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1[reference.to_e2m1(ties).long()].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert (reference.to_e2m1(ties) % 2 == 0).all()


def test_rows_come_back_within_the_error_of_the_format() -> None:
    """With the usual factor: half a step of e2m1 (a sixth of the block's
    largest), and e4m3's of the scale.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 256, generator=generator) * torch.exp2(
        torch.randint(-3, 4, (50, 1), generator=generator).float()
    )
    x = x.to(torch.bfloat16)
    factor = 448 * 6 / x.abs().max().float()
    packed, scales = reference.quantise_nvfp4(x, factor)
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    values = E2M1[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    blocks = (
        values.view(50, 16, 16) * scales.view(torch.float8_e4m3fn).float().unsqueeze(2) / factor
    )
    largest = x.float().view(50, 16, 16).abs().amax(dim=2, keepdim=True)
    error = (blocks - x.float().view(50, 16, 16)).abs()
    assert bool((error <= largest * (1 / 6 + 1 / 16)).all())


def test_tiles_lie_as_block_scaled_products_read_them() -> None:
    tiles = torch.arange(2 * 3 * 32 * 4 * 4).view(2, 3, 32, 4, 4)
    rows = reference.rows_of_scale_tiles(tiles, 200)
    assert rows.shape == (200, 12)
    for row, column in ((0, 0), (31, 5), (32, 1), (127, 11), (128, 4), (199, 7)):
        place = (row // 128, column // 4, row % 32, row % 128 // 32, column % 4)
        assert int(rows[row, column]) == int(tiles[place])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"x_global_scale": torch.ones(1)}, "x_global_scale"),
        ({"use_nvfp4": True, "x_global_scale": torch.ones(2)}, "x_global_scale"),
        (
            {"use_nvfp4": True, "x_global_scale": torch.ones(1, dtype=torch.float64)},
            "x_global_scale",
        ),
        ({"use_nvfp4": True, "x_global_scale": 2.0}, "x_global_scale"),
        ({"use_nvfp4": True, "round_scale": True}, "round_scale"),
        ({"use_nvfp4": True, "round_scale": True, "use_ue8m0": True}, "use_ue8m0"),
    ],
)
@run_by(on_buffers, 1, 0, 1 << 20, low_latency_mode=True)
def test_a_bad_argument_is_named(buffer, /, options: dict, name: str) -> None:
    x, idx = torch.ones(3, 128, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(deep_comm.ArgumentError) as caught:
        buffer.low_latency_dispatch(x, idx, 8, 1, **options)
    assert caught.value.argument == name
    with pytest.raises(deep_comm.ArgumentError, match="multiple of 64"):
        buffer.low_latency_dispatch(x[:, :32].contiguous(), idx, 8, 1, use_nvfp4=True)


def test_formats_take_turns_on_one_buffer() -> None:
    base = LowLatencyCase((5, 8), 8, hidden=256, topk=3, calls=1)
    cases = [
        base,
        dataclasses.replace(base, use_nvfp4=True),
        dataclasses.replace(base, use_fp8=True),
    ]

    def fn(group):
        from low_latency import run_pairs

        with deep_comm.Buffer(
            group, 0, base.num_bytes, low_latency_mode=True, device="cpu"
        ) as buffer:
            return [run_pairs(buffer, case) for case in (*cases, *cases)]

    results = local.run(fn, 2, timeout_s=60)
    for number, case in enumerate((*cases, *cases)):
        verify(case, [ranks[number] for ranks in results])
