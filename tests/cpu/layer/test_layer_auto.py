"""Auto mode with ranks that disagree: the same calls on all ranks, under any schedule."""

import random
from typing import Any

import pytest
import torch
from layer_cases import Experts, LayerCase, build, inputs, random_steps, run, verify
from schedules import some_of

from deep_comm import ArgumentError, ConfigMismatch, PeerTimeout, local, simulate
from deep_comm.layer.mode import ModeRule


def modes_of(case: LayerCase, results: Any) -> list[list[str]]:
    return [modes for _, modes in results[0]]


def expected_modes(case: LayerCase) -> list[list[str]]:
    """The documented rule, from the tokens of all ranks."""
    modes, begins_with_decode = [], True
    for tokens in case.steps:
        fits = max(tokens) <= case.decode_tokens
        if case.how == "forward":
            opened = ["decode"] if begins_with_decode else []
            late = ["prefill"] if not begins_with_decode or not fits else []
            modes.append(opened + late)
        else:
            modes.append(["decode" if begins_with_decode and fits else "prefill"])
        begins_with_decode = fits
    return modes


@pytest.mark.parametrize("how", ["forward", "split", "async"])
def test_the_mode_follows_the_rule(how: str) -> None:
    choose = random.Random(5)
    case = LayerCase(random_steps(choose, 3, 12, 4, 24), 12, 4, how=how)
    results = local.run(lambda group: run(group, case), 3, timeout_s=60)
    verify(case, results)
    assert modes_of(case, results) == expected_modes(case)
    assert {"decode", "prefill"} <= {mode for modes in modes_of(case, results) for mode in modes}


@pytest.mark.parametrize("mode", ["auto", "prefill", "decode"])
@pytest.mark.parametrize("tokens", [3, 9])
def test_the_layer_goes_on_where_the_programs_parts_of_a_step_raised(
    mode: str, tokens: int
) -> None:
    """On all ranks alike: what was sent has been received by then."""
    if mode == "decode":
        tokens = 3
    case = LayerCase(((tokens, 2),), 9, 3, mode=mode)

    def raises(_: Any) -> torch.Tensor:
        raise ZeroDivisionError

    def main(group: Any) -> None:
        given = inputs(case, group.rank(), 0)
        with build(group, case) as layer, torch.no_grad():
            expected = layer(*given, Experts())
            for _ in range(3):
                for parts in ((raises, None), (Experts(), raises)):
                    with pytest.raises(ZeroDivisionError):
                        layer(*given, parts[0], shared=parts[1])
                assert torch.equal(layer(*given, Experts()), expected)

    local.run(main, 2, timeout_s=60)


def test_tokens_of_ranks_that_fit_are_computed_once() -> None:
    case = LayerCase(((3, 9, 2),), 9, 3, experts=6)
    rows: dict[int, list[int]] = {}

    def main(group: Any) -> None:
        seen = []

        def experts(batch: Any) -> torch.Tensor:
            seen.append(int(batch.num_tokens_per_expert.sum()))
            return batch.x.clone()

        with build(group, case) as layer, torch.no_grad():
            layer(*inputs(case, group.rank(), 0), experts)
        rows[group.rank()] = seen

    local.run(main, 3, timeout_s=30)
    # Every selection of every token has had its row, in one of the two batches.
    assert sum(map(sum, rows.values())) == (3 + 9 + 2) * case.topk
    assert sum(counts[0] for counts in rows.values()) == (3 + 2) * case.topk


def test_every_schedule_gives_the_same_bits() -> None:
    for seed in some_of(range(120)):
        choose = random.Random(seed)
        num_ranks = choose.choice((1, 2, 3, 4))
        case = LayerCase(
            random_steps(choose, num_ranks, 5, 2, choose.choice((2, 4))), max_tokens=5,
            decode_tokens=2, hidden=choose.choice((8, 32)), experts=choose.choice((2, 5)),
            topk=choose.choice((1, 2)),
            routing=choose.choice(("random", "holes", "none", "one_expert")),
            how=choose.choice(("forward", "split", "async", "shared", "mixed")), seed=seed,
        )  # fmt: skip
        try:
            verify(
                case,
                simulate.run(
                    lambda group, case=case: run(group, case), num_ranks, seed, timeout_s=60
                ),
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def _with_broken_rule(group: Any, how: str) -> list[str]:
    """Rank 0 forgets what it has learned: its next step begins with another mode."""
    case = LayerCase(((6, 1), (1, 1), (1, 1)), 6, 2)
    names = []
    with build(group, case, timeout_s=2) as layer, torch.no_grad():
        for step in range(3):
            if step == 1 and group.rank() == 0:
                layer.rule.begins_with_decode = True
            try:
                x, idx, weights = inputs(case, group.rank(), step)
                if how == "forward":
                    layer(x, idx, weights, Experts())
                else:
                    batch = layer.dispatch(x, idx, weights)
                    layer.combine(batch, batch.x)
            except (ConfigMismatch, PeerTimeout) as error:
                names.append(type(error).__name__)
                break
        group.barrier()
        layer.reset()
    return names


@pytest.mark.parametrize("how", ["forward", "split"])
def test_ranks_with_different_rules_fail_within_the_deadline(how: str) -> None:
    """The negative control: what the rule protects from is an error, not a hang and not bits."""
    results = local.run(lambda group: _with_broken_rule(group, how), 2, timeout_s=30)
    assert all(results), results


def test_one_rank_that_forwards_while_the_other_splits_fails_within_the_deadline() -> None:
    case = LayerCase(((6, 1),), 6, 2)

    def main(group: Any) -> str:
        with build(group, case, timeout_s=2) as layer, torch.no_grad():
            x, idx, weights = inputs(case, group.rank(), 0)
            try:
                if group.rank() == 0:
                    layer(x, idx, weights, Experts())
                else:
                    batch = layer.dispatch(x, idx, weights)
                    layer.combine(batch, batch.x)
            except (ConfigMismatch, PeerTimeout) as error:
                return type(error).__name__
            return ""

    assert all(local.run(main, 2, timeout_s=30))


@pytest.mark.parametrize("wrong", ["rows of topk_idx", "dtype of weights", "shape of weights"])
def test_arguments_of_a_large_step_are_checked_before_its_small_part(wrong: str) -> None:
    case = LayerCase(((9, 2),), 9, 3)

    def main(group: Any) -> None:
        x, idx, weights = inputs(case, group.rank(), 0)
        with build(group, case) as layer, torch.no_grad():
            if group.rank() == 0:  # alone: nothing may have been launched
                given = {
                    "rows of topk_idx": (x, idx[:-1], weights),
                    "dtype of weights": (x, idx, weights.double()),
                    "shape of weights": (x, idx, weights[:, :-1]),
                }[wrong]
                for call in (lambda *parts: layer(*parts, Experts()), layer.dispatch_async):
                    with pytest.raises(ArgumentError, match="^topk_"):
                        call(*given)
            assert layer.rule.num_steps == 0
            experts = Experts()
            layer(x, idx, weights, experts)
            assert experts.modes == ["decode", "prefill"]

    local.run(main, 2, timeout_s=30)


def test_a_layer_may_be_built_under_another_default_dtype() -> None:
    case = LayerCase(((9, 2),), 9, 3, dtype=torch.bfloat16)
    given = [inputs(case, rank, 0) for rank in range(2)]

    def main(group: Any) -> torch.Tensor:
        with build(group, case) as layer, torch.no_grad():
            return layer(*given[group.rank()], lambda batch: batch.x * 2)

    expected = local.run(main, 2, timeout_s=30)
    torch.set_default_dtype(torch.bfloat16)  # as programs do while they build a model
    try:
        results = local.run(main, 2, timeout_s=30)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_grad_mode_takes_prefill_and_tells_the_rule() -> None:
    case = LayerCase(((1, 1), (1, 6), (1, 1)), 6, 2)

    def main(group: Any) -> list[list[str]]:
        modes = []
        with build(group, case) as layer:
            for step in range(3):
                experts = Experts()
                with torch.set_grad_enabled(step != 2):
                    layer(*inputs(case, group.rank(), step), experts)
                modes.append(experts.modes)
        return modes

    # The last step begins with prefill, because the one before it had six tokens on a rank.
    assert local.run(main, 2, timeout_s=30) == [[["prefill"], ["prefill"], ["prefill"]]] * 2


def test_where_no_rank_can_exceed_nobody_asks() -> None:
    case = LayerCase(((2, 1), (0, 2)), max_tokens=2, decode_tokens=2)

    def main(group: Any) -> int:
        with build(group, case) as layer, torch.no_grad():
            assert layer.shape.num_slots == 2
            for step in range(2):
                experts = Experts()
                layer(*inputs(case, group.rank(), step), experts)
                assert experts.modes == ["decode"]
            return layer.rule.num_steps

    assert local.run(main, 2, timeout_s=30) == [0, 0]


def test_the_rule_counts_steps_and_changes() -> None:
    rule = ModeRule(decode_tokens=4)
    assert [rule.learn(most) for most in (4, 5, 5, 0, 4)] == [True, False, False, True, True]
    assert (rule.num_steps, rule.num_changes, rule.begins_with_decode) == (5, 2, True)


def _two_in_flight(group: Any, case: LayerCase) -> list[torch.Tensor]:
    """Steps in pairs: both are sent before the first is received."""
    results = []
    with build(group, case) as layer, torch.no_grad():
        for step in range(0, len(case.steps), 2):
            sent = [
                layer.dispatch_async(*inputs(case, group.rank(), step + half)) for half in (0, 1)
            ]
            batches = [pending.result() for pending in sent]
            back = [layer.combine_async(batch, Experts()(batch)) for batch in batches]
            results += [pending.result() for pending in back]
    return results


def test_two_batches_in_flight_may_each_change_the_mode() -> None:
    for seed in range(40):
        choose = random.Random(seed)
        num_ranks = choose.choice((1, 2, 3))
        case = LayerCase(
            random_steps(choose, num_ranks, 5, 2, 6), 5, 2, hidden=32, experts=5, seed=seed
        )
        results = simulate.run(
            lambda group, case=case: _two_in_flight(group, case), num_ranks, seed, timeout_s=60
        )
        verify(case, [[(y, ["any"]) for y in ys] for ys in results])
