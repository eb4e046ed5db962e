"""Warp collectives against their CUDA meaning."""

from __future__ import annotations

import numpy as np
import pytest
from simt_machine import Shape, native, run_direct, run_on

UNDEFINED_64 = 0xA5A5A5A5A5A5A5A5
COLUMNS = 16
MASKS = [0xFFFFFFFF, 0x0000FFFF, 0xFFFF0000, 0x00000001, 0x80000001, 0x12345678, 0xAAAAAAAA]


def test_threads_know_who_they_are(machine: str) -> None:
    shape = Shape(num_blocks=3, num_threads=96)
    memory = run_on(machine, "identity", shape=shape)
    for block in range(3):
        for thread in range(96):
            row = memory[(block * 96 + thread) * COLUMNS :][:8].tolist()
            assert row == [thread, 96, block, 3, thread % 32, thread // 32, 3, 0]


def expected_row(mask: int, argument: int, lane: int) -> list[int]:
    lanes = [i for i in range(32) if mask >> i & 1]

    def small(source: int) -> int:
        source = source if 0 <= source < 32 else lane
        return source * 3 + 1 if mask >> source & 1 else UNDEFINED_64 & 0xFFFFFFFF

    def large(source: int) -> int:
        value = source * 3 + 1
        return value << 40 | value if mask >> source & 1 else UNDEFINED_64

    def real(source: int) -> int:
        if not mask >> source & 1:
            return UNDEFINED_64 & 0xFFFFFFFF
        return int(np.float32(source).view(np.uint32))

    def same(key: dict[int, int]) -> int:
        return sum(1 << i for i in lanes if key[i] == key[lane])

    small_key = {i: (i * 3 + 1) % 5 for i in lanes}
    large_key = {i: ((i * 3 + 1) << 40 | (i * 3 + 1)) % 7 for i in lanes}
    return [
        small(argument % 32), small(lane ^ argument), small(lane - argument),
        small(lane + argument), large(argument % 32), large(lane ^ argument), real(argument % 32),
        sum(1 << i for i in lanes if i % 2), int(argument in lanes),
        int(all(i >= argument for i in lanes)), same(small_key), same(large_key),
    ]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=hex)
@pytest.mark.parametrize("argument", [0, 1, 5, 16, 31])
def test_collectives_of_partial_masks(mask: int, argument: int) -> None:
    for machine in ("direct", "seed 3"):
        memory = run_on(machine, "warp_ops", [mask, argument])
        for lane in range(32):
            row = memory[lane * COLUMNS :][:12].tolist()
            expected = expected_row(mask, argument, lane) if mask >> lane & 1 else [0] * 12
            assert row == expected, f"lane {lane}"


def test_disjoint_masks_run_apart_and_meet_again(machine: str) -> None:
    memory = run_on(machine, "split_warp", shape=Shape(num_threads=64))
    lower = sum(15 + i for i in range(3))
    upper = sum(31 + i for i in range(7))
    assert memory[:64].tolist() == [lower + upper] * 64


def test_exactly_one_lane_is_elected_and_always_the_same(machine: str) -> None:
    memory = run_on(machine, "elect", shape=Shape(num_threads=128))
    assert memory[:4].tolist() == [4] * 4
    assert len(set(memory[4:8].tolist())) == 1


def test_sync_warp_orders_shared_memory(machine: str) -> None:
    assert run_on(machine, "warp_rounds", [50], shape=Shape(num_threads=64))[0] == 0


@pytest.mark.parametrize("bits", [0, 1, 0x80000000, 0xFFFFFFFF, 0x00F00100])
def test_bit_operations(bits: int) -> None:
    popc, ffs, clz = run_direct("bit_ops", [bits], shape=Shape(num_threads=1))[:3].tolist()
    assert popc == bits.bit_count()
    assert ffs == (bits & -bits).bit_length()
    assert clz == 32 - bits.bit_length()


def test_fp16_conversions_agree_with_ieee() -> None:
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    values = native.fp16_to_float(every)
    expected = every.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(values, expected)

    random = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint64)
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.concatenate(
            [
                random.astype(np.uint32).view(np.float32),
                expected,
                # the middle between two neighbours, and just beside it: ties go to even
                (expected[:-1] + expected[1:]) / 2,
                np.nextafter((expected[:-1] + expected[1:]) / 2, np.float32(0)),
                np.array([65504, 65519.996, 65520, 2.0**-25, 2.0**-24, 3e-8], np.float32),
            ]
        )
        halves = floats.astype(np.float16)
    got = native.float_to_fp16(floats).view(np.float16)
    is_nan = np.isnan(floats)
    assert np.isnan(got[is_nan]).all()
    np.testing.assert_array_equal(got[~is_nan].view(np.uint16), halves[~is_nan].view(np.uint16))


def test_bf16_conversions_round_to_nearest_even() -> None:
    every = np.arange(65536, dtype=np.uint32)
    values = native.bf16_to_float(every.astype(np.uint16))
    np.testing.assert_array_equal(values.view(np.uint32), every << 16)

    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint64)
    ties = (every.astype(np.uint64) << 16) + 0x8000
    bits = np.concatenate([bits, ties, ties + 1, ties - 1]).astype(np.uint64) & 0xFFFFFFFF
    floats = bits.astype(np.uint32).view(np.float32)
    got = native.float_to_bf16(floats).astype(np.uint64)
    is_nan = np.isnan(floats)
    assert np.isnan(native.bf16_to_float(got[is_nan].astype(np.uint16))).all()
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    np.testing.assert_array_equal(got[~is_nan], (high + up)[~is_nan])
