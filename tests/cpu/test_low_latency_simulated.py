"""Low-latency pairs under seeded schedules with weak memory, and with steps left out."""

import random

import pytest
import torch
from low_latency import LowLatencyCase, Pair, inputs_of, run_case, verify, verify_dispatch
from schedules import POLICIES, run_policy, run_seeds

from deep_comm import (
    Buffer,
    DeepCommError,
    PeerTimeout,
    reference_low_latency,
    simulate,
)

NUM_SEEDS = 400
SEEDS_PER_TEST = 50
ROUTINGS = ("random", "skewed", "holes", "one_expert", "none", "duplicates")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_POISON", "1")


def small_case(seed: int) -> LowLatencyCase:
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 2, 3, 4))
    max_tokens = choose.choice((1, 3, 5))
    use_fp8 = choose.random() < 0.4
    compact = choose.random() < 0.4
    return LowLatencyCase(
        tuple(choose.choice((0, 1, max_tokens)) for _ in range(num_ranks)),
        max_tokens,
        hidden=128 if use_fp8 else choose.choice((8, 32, 1024)),
        experts=choose.choice((2, 5, 8)),
        topk=choose.choice((1, 2, 4)),
        routing=choose.choice(ROUTINGS),
        use_fp8=use_fp8,
        compact=compact,
        weights_ahead=choose.random() < 0.4,
        one_rounding=not compact and choose.random() < 0.35,
        mode=choose.choice(("plain", "hook", "late")),
        calls=choose.choice((2, 4)),
        seed=seed,
    )


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_schedule_gives_the_same_bits(first_seed: int) -> None:
    run_seeds(range(first_seed, first_seed + SEEDS_PER_TEST), small_case, run_case, verify)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_eight_ranks(policy: str) -> None:
    case = LowLatencyCase((3, 0, 2, 4, 1, 4, 2, 3), 4, hidden=128, experts=19, topk=3, use_fp8=True)
    run_policy(policy, case, run_case, verify)


# Five pairs with a stalled rank: a half is used again while somebody may still read it.
CASE = LowLatencyCase((3, 5, 4), 5, hidden=64, experts=6, calls=6, weights_ahead=True)


def notices(seed: int, faults: tuple[str, ...], case: LowLatencyCase) -> str | None:
    try:
        results = simulate.run(
            lambda group: run_case(group, case), case.num_ranks, seed, faults=faults,
            stalls=[(seed % 3, 500 + 137 * seed, 4000)], timeout_s=60,
        )  # fmt: skip
        verify(case, results)
    except (AssertionError, DeepCommError, simulate.MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("fault", ["skip_arrival", "skip_clear"])
def test_simulation_finds_words_that_are_read_early_or_left_behind(fault: str) -> None:
    """There is no release behind the payload that could be missing: every word says of itself that
    it has come, if it is awaited, and if its place was zero before."""
    assert any(notices(seed, (fault,), CASE) for seed in range(40))


def dispatch_twice(group: simulate.SimulatedGroup, num_rounds: int) -> list:
    """Two dispatches in flight, and nothing that answers: only credit keeps a half from being
    written while a slow rank has yet to read it."""
    case = LowLatencyCase((4, 4), 4, hidden=64, experts=4, mode="late")
    with Buffer(group, 0, case.num_bytes, low_latency_mode=True, device="cpu") as buffer:
        results = []
        for first in range(0, 2 * num_rounds, 2):
            pairs = [Pair(buffer, case, call) for call in (first, first + 1)]
            hooks = [pair.dispatch() for pair in pairs]
            for hook in hooks:
                hook()
            for pair in pairs:
                xs, idxs, _ = zip(*(inputs_of(case, r, pair.call) for r in (0, 1)), strict=True)
                expected = reference_low_latency.low_latency_dispatch(xs, idxs, 4, 4)[buffer.rank]
                pair.combined_x = pair.x
                verify_dispatch(case, pair.received(), expected, f"call {pair.call}")
        return results


def run_dispatches(seed: int, faults: tuple[str, ...]) -> str | None:
    try:
        simulate.run(
            lambda group: dispatch_twice(group, 3), 2, seed, faults=faults,
            stalls=[(seed % 2, 100 + 211 * seed, 4000)], timeout_s=60,
        )  # fmt: skip
    except (AssertionError, DeepCommError, simulate.MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_simulation_finds_a_half_that_is_used_too_early() -> None:
    assert any(run_dispatches(seed, ("skip_credit",)) for seed in range(60))


def test_dispatches_without_combines_pass_without_a_fault() -> None:
    for seed in range(20):
        found = run_dispatches(seed, ())
        assert found is None, f"seed {seed}: {found}"


def test_the_same_runs_pass_without_a_fault() -> None:
    for seed in range(10):
        found = notices(seed, (), CASE)
        assert found is None, f"seed {seed}: {found}"


def test_a_rank_that_stays_away_is_named_in_virtual_time() -> None:
    case = LowLatencyCase((3, 3, 3), 4)

    def main(group: simulate.SimulatedGroup) -> None:
        buffer = Buffer(
            group, 0, case.num_bytes, low_latency_mode=True, device="cpu", timeout_s=1000
        )
        if group.rank() != 1:
            x, idx = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
            buffer.low_latency_dispatch(x, idx, 4, 3, use_fp8=False)

    errors = simulate.run(main, 3, seed=3, on_stuck="clock", return_errors=True)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerTimeout)
        assert error.peer == 1 and error.kernel == "low_latency_dispatch"
