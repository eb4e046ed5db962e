"""What the hosts of a node tell one another beside a decode exchange of "auto"."""

import random
import time
from typing import Any

import pytest
import torch
from layer_cases import LayerCase, build, inputs

from deep_comm import _core, local
from deep_comm.layer.host_words import HostWords
from deep_comm.rendezvous import Rendezvous

NUM_RANKS = 3


def most_of(words: HostWords, exchange: int) -> int:
    most = None
    while most is None:
        most = words.most(exchange)
    return most


def test_all_ranks_learn_the_most_that_any_has() -> None:
    """Ranks that fall behind and run ahead, by chance; now and then two exchanges without words."""

    def fn(group: Any) -> list[int]:
        words = HostWords.create(Rendezvous(group))
        assert words is not None
        own, common = random.Random(group.rank()), random.Random(100)
        learnt = []
        for _ in range(300):
            words.set_exchange(words.exchange() + common.choice((0, 0, 2)))
            if own.random() < 0.1:
                time.sleep(own.random() * 1e-3)
            learnt.append(most_of(words, words.tell(own.randrange(70000))))
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


def test_a_rank_that_has_not_told_is_not_waited_for_and_old_words_are_no_answer() -> None:
    def fn(group: Any) -> None:
        words = HostWords.create(Rendezvous(group))
        assert words is not None
        for exchange in (1, 2):
            assert words.tell(5) == exchange
            group.barrier()
            assert words.most(exchange) == 5
        group.barrier()
        words.set_exchange(3)
        if group.rank() != 1:
            assert words.tell(9) == 4
            assert words.most(4) is None  # rank 1's word there is of the second exchange
        assert words.most(6) is None

    local.run(fn, NUM_RANKS, timeout_s=60)


def test_a_rank_that_tells_a_little_later_is_found_and_other_threads_run_meanwhile() -> None:
    def fn(group: Any) -> int:
        words = HostWords.create(Rendezvous(group))
        assert words is not None
        num_found = 0
        for exchange in range(1, 201):
            group.barrier()
            if group.rank() == 0:
                while not is_looking[exchange]:
                    time.sleep(0)
            elif group.rank() == 1:
                is_looking[exchange] = True
            assert words.tell(exchange) == exchange
            num_found += words.most(exchange) == exchange
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
    monkeypatch.setattr("deep_comm.layer.host_words._core.Segment", Segment)
    case = LayerCase(((3, 20), (2, 2), (2, 30), (1, 1)), 64, 8)

    def fn(group: Any) -> list[bool]:
        with build(group, case) as layer, torch.inference_mode():
            assert layer._steps._host_words is None
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


def test_the_rule_is_the_same_by_words_and_after_a_reset_and_a_named_mode() -> None:
    case = LayerCase(((3, 20), (2, 2), (2, 30), (1, 1)), 64, 8)

    def fn(group: Any) -> None:
        rank = group.rank()
        with build(group, case) as layer, torch.inference_mode():
            assert layer._steps._host_words is not None
            want = [False, True, False, True]
            assert _modes(layer, case, rank) == want
            assert _modes(layer, case, rank, is_split=True) == want
            layer(*inputs(case, rank, 1), lambda batch: batch.x, mode="decode")
            assert _modes(layer, case, rank) == want
            words = layer._steps._host_words
            words.set_exchange(words.exchange() + 3 * rank)  # as if one had failed earlier
            layer.reset()
            assert _modes(layer, case, rank) == want

    local.run(fn, 2, timeout_s=60)
