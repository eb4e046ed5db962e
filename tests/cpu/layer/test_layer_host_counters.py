"""What the hosts of a node tell one another beside a decode exchange of "auto"."""

import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from layer_cases import LayerCase, build, inputs, random_steps
from run_by import run_by

from deep_comm import CallInterrupted, PeerTimeout, _core, local, processes
from deep_comm._core import HostCounters
from deep_comm.layer import steps
from deep_comm.layer.host_counters import max_tokens_of_step, shared_counters
from deep_comm.layer.mode import ModeRule
from deep_comm.ranks.rendezvous import Rendezvous

NUM_RANKS = 3


def most_of(counters: HostCounters, exchange: int) -> int:
    most = None
    while most is None:
        most = counters.max(exchange)
    return most


def test_all_ranks_learn_the_most_that_any_has() -> None:
    """Ranks that fall behind and run ahead, by chance; sometimes two exchanges without any."""

    def fn(group: Any) -> list[int]:
        counters = shared_counters(Rendezvous(group))
        assert counters is not None
        own, common = random.Random(group.rank()), random.Random(100)
        learnt = []
        for _ in range(300):
            counters.set_exchange(counters.exchange() + common.choice((0, 0, 2)))
            if own.random() < 0.1:
                time.sleep(own.random() * 1e-3)
            learnt.append(most_of(counters, counters.publish(own.randrange(70000))))
        return learnt

    def told(rank: int) -> list[int]:
        own, numbers = random.Random(rank), []
        for _ in range(300):
            if own.random() < 0.1:
                own.random()
            numbers.append(own.randrange(70000))
        return numbers

    want = [max(numbers) for numbers in zip(*map(told, range(NUM_RANKS)), strict=True)]
    assert local.run(fn, NUM_RANKS, timeout_s=60) == [want] * NUM_RANKS


@run_by(local.run, NUM_RANKS, timeout_s=60)
def test_a_rank_that_has_not_published_is_not_waited_for_and_old_counters_are_no_answer(
    group: Any, /
) -> None:
    counters = shared_counters(Rendezvous(group))
    assert counters is not None
    for exchange in (1, 2):
        assert counters.publish(5) == exchange
        group.barrier()
        assert counters.max(exchange) == 5
    group.barrier()
    counters.set_exchange(3)
    if group.rank() != 1:
        assert counters.publish(9) == 4
        assert counters.max(4) is None  # rank 1's word there is of the second exchange
    assert counters.max(6) is None


def test_a_rank_that_publishes_a_little_later_is_found_and_other_threads_run_meanwhile() -> None:
    def fn(group: Any) -> int:
        counters = shared_counters(Rendezvous(group))
        assert counters is not None
        num_found = 0
        for exchange in range(1, 201):
            group.barrier()
            if group.rank() == 0:
                while not is_looking[exchange]:
                    time.sleep(0)
            elif group.rank() == 1:
                is_looking[exchange] = True
            assert counters.publish(exchange) == exchange
            num_found += counters.max(exchange) == exchange
        return num_found

    is_looking = [False] * 201
    found = local.run(fn, NUM_RANKS, timeout_s=60)
    # Time slices of a busy machine are longer than anybody looks.
    assert sum(found) >= 100, found


@pytest.mark.parametrize("missing", ["attach", "create"])
def test_ranks_without_common_memory_do_without_on_all_of_them(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Segment:
        create = staticmethod(_core.Segment.create)
        attach = staticmethod(_core.Segment.attach)

    def refuse(*args: object) -> None:
        raise FileNotFoundError("another container's memory")

    monkeypatch.setattr(Segment, missing, refuse)
    monkeypatch.setattr("deep_comm.layer.host_counters._core.Segment", Segment)
    case = LayerCase(((3, 20), (2, 2), (2, 30), (1, 1)), 64, 8)

    def fn(group: Any) -> list[bool]:
        with build(group, case) as layer, torch.inference_mode():
            assert layer._steps._host_counters is None
            return _modes(layer, case, group.rank())

    assert local.run(fn, 2, timeout_s=60) == [[False, True, False, True]] * 2


def _modes(layer: Any, case: LayerCase, rank: int, is_split: bool = False) -> list[bool]:
    modes = []
    for step in range(len(case.steps)):
        if is_split:
            batch = layer.dispatch(*inputs(case, rank, step))
            layer.combine(batch, batch.x)
        else:
            layer(*inputs(case, rank, step), lambda batch: batch.x)
        modes.append(layer.rule.begins_with_decode)
    return modes


def test_the_rule_is_the_same_by_counters_and_after_a_reset_and_a_named_mode() -> None:
    case = LayerCase(((3, 20), (2, 2), (2, 30), (1, 1)), 64, 8)

    def fn(group: Any) -> None:
        rank = group.rank()
        with build(group, case) as layer, torch.inference_mode():
            assert layer._steps._host_counters is not None
            want = [False, True, False, True]
            assert _modes(layer, case, rank) == want
            assert _modes(layer, case, rank, is_split=True) == want
            layer(*inputs(case, rank, 1), lambda batch: batch.x, mode="decode")
            assert _modes(layer, case, rank) == want
            counters = layer._steps._host_counters
            counters.set_exchange(counters.exchange() + 3 * rank)  # as if one had failed earlier
            layer.reset()
            assert _modes(layer, case, rank) == want

    local.run(fn, 2, timeout_s=60)


@pytest.mark.parametrize("how", ["forward", "split", "async"])
def test_ranks_whose_counters_are_late_or_lost_learn_the_same(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dawdles for longer than anybody looks, rank 2 counts other exchanges."""
    case = LayerCase(random_steps(random.Random(11), 3, 10, 4, 24), 24, 4, how=how)
    fits = [max(tokens) <= case.decode_tokens for tokens in case.steps]
    learned: list[tuple[int, int | None]] = []

    def noted(ctx: Any, counters: HostCounters, state: Any) -> int:
        most = max_tokens_of_step(ctx, counters, state)
        learned.append((most, counters.max(state.exchange)))
        return most

    monkeypatch.setattr(steps, "max_tokens_of_step", noted)

    def main(group: Any) -> list[bool]:
        rank, modes = group.rank(), []
        with build(group, case) as layer, torch.inference_mode():
            counters = layer._steps._host_counters
            if rank == 2:
                counters.set_exchange(7)
            for step in range(len(case.steps)):
                if rank == 1:
                    time.sleep(random.Random(step).choice((0, 2e-3)))
                _take(layer, how, inputs(case, rank, step))
                modes.append(layer.rule.begins_with_decode)
        return modes

    assert local.run(main, 3, timeout_s=60) == [fits] * 3
    assert any(told is None for _, told in learned)  # what the exchange has brought


def _take(layer: Any, how: str, parts: Any) -> None:
    if how == "forward":
        layer(*parts, lambda batch: batch.x)
        return
    batch = layer.dispatch(*parts) if how == "split" else layer.dispatch_async(*parts).result()
    layer.combine(batch, batch.x)


def _killed_in_a_step(group: Any, has_told: bool) -> Any:
    """Rank 1 ends in its third step, when it has told the others or before."""
    case = LayerCase(((2, 2, 1),) * 4, 24, 8)
    rank = group.rank()
    with build(group, case, timeout_s=2) as layer, torch.inference_mode():
        counters = layer._steps._host_counters
        try:
            for step in range(len(case.steps)):
                if rank == 1 and step == 2:
                    if has_told:
                        counters.publish(2)
                    os.kill(os.getpid(), signal.SIGKILL)
                layer(*inputs(case, rank, step), lambda batch: batch.x)
        except PeerTimeout as error:
            return step, error.peer
    return None


@pytest.mark.parametrize("has_told", [False, True])
def test_a_rank_that_is_killed_is_named_whether_it_has_told_or_not(has_told: bool) -> None:
    started = time.monotonic()
    ended = forked.outcomes(_killed_in_a_step, 3, has_told)
    assert isinstance(ended[1].error, processes.RankFailed)
    for rank in (0, 2):
        step, peer = ended[rank].value
        assert peer == 1 and step in ((2, 3) if has_told else (2,))
    assert time.monotonic() - started < 30


class _Exchange:
    """One on a device, which ends at the third question; none of its ranks tells before `told`."""

    def __init__(self, told: int, interrupted: bool = False) -> None:
        self.told, self.interrupted, self.looks, self.asked = told, interrupted, 0, 0
        self.log: list[str] = []
        self.backend = SimpleNamespace(mark=self._mark)
        self.engine = SimpleNamespace(note_interrupt=lambda: self.log.append("interrupt"))
        parts = {"recv_tokens": torch.tensor([3, 9, 4], dtype=torch.int32)}
        self.state = SimpleNamespace(exchange=1, record=SimpleNamespace(part=parts.get))

    def _mark(self) -> Any:
        self.log.append("mark")
        return self

    def has_passed(self) -> bool:
        self.asked += 1
        return self.asked == 3

    def max(self, exchange: int) -> int | None:
        self.looks += 1
        if self.interrupted and self.looks == 2:
            raise KeyboardInterrupt
        return 8 if self.looks >= self.told else None

    def check(self) -> None:
        self.log.append("check")


@pytest.mark.parametrize(
    ("told", "most", "log"),
    [(1, 8, []), (2, 8, ["mark"]), (3, 8, ["mark"]), (9, 9, ["mark", "check"])],
)
def test_what_is_there_first_counters_or_the_exchange(told: int, most: int, log: list[str]) -> None:
    exchange: Any = _Exchange(told)
    assert max_tokens_of_step(exchange, exchange, exchange.state) == most
    assert exchange.log == log


def test_a_wait_for_counters_that_is_interrupted_says_so_to_the_engine() -> None:
    """The rule has not learned of the exchange, which the other ranks' has."""
    exchange: Any = _Exchange(9, interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        max_tokens_of_step(exchange, exchange, exchange.state)
    assert exchange.log == ["mark", "interrupt"]


def test_a_step_whose_rule_has_not_learned_is_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its combine has been launched, so that the peers go on, with what they have learned."""
    learn, here = ModeRule.learn, threading.local()

    def learn_or_raise(rule: ModeRule, max_num_tokens: int) -> bool:
        if getattr(here, "raises", False):
            raise KeyboardInterrupt
        return learn(rule, max_num_tokens)

    monkeypatch.setattr(ModeRule, "learn", learn_or_raise)
    case = LayerCase(((2, 3),) * 2, max_tokens=8, decode_tokens=4)

    def fn(group: Any) -> None:
        rank = group.rank()
        with build(group, case) as layer, torch.inference_mode():
            layer(*inputs(case, rank, 0), lambda batch: batch.x)
            group.barrier()
            here.raises = rank == 1
            if rank == 0:
                layer(*inputs(case, rank, 1), lambda batch: batch.x)
                return
            with pytest.raises(KeyboardInterrupt):
                layer(*inputs(case, rank, 1), lambda batch: batch.x)
            here.raises = False
            with pytest.raises(CallInterrupted):
                layer(*inputs(case, rank, 1), lambda batch: batch.x)

    local.run(fn, 2, timeout_s=60)
