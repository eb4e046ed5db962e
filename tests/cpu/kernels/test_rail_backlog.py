"""What a software NIC puts together, and how it keeps to a speed (csrc/host/rail_backlog.hpp)."""

from __future__ import annotations

import random

import pytest

from deep_comm import _simt_tests

SLOT = 128
WORDS = 1 << 40  # where signals go: apart from all data


@pytest.mark.parametrize("bytes_per_s", [0.0, 50e9])
@pytest.mark.parametrize("seed", range(60))
def test_a_signal_shows_all_that_was_posted_before_it(seed: int, bytes_per_s: float) -> None:
    """Rings of slots, with several words a queue; the source of a put is read when it leaves."""
    choose = random.Random(seed)
    num_queues, num_slots, now = 3, 7, 1000
    backlog = _simt_tests.RailBacklog(num_queues, bytes_per_s)
    num_puts, arrived = [0] * num_queues, [set() for _ in range(num_queues)]
    last_value: dict[tuple[int, int], int] = {}
    seen_value: dict[tuple[int, int], int] = {}
    implied: dict[tuple[int, int, int], int] = {}  # puts before a signal
    bytes_in = bytes_out = 0

    def advance() -> None:
        nonlocal bytes_out
        for queue, dst, src, num_bytes, value in backlog.advance(now):
            if num_bytes:
                bytes_out += num_bytes
                assert num_bytes <= backlog.max_put_bytes and num_bytes % SLOT == 0
                first = (dst % (1 << 30)) // SLOT
                assert src % (1 << 30) == dst % (1 << 30)
                arrived[queue] |= set(range(first, first + num_bytes // SLOT))
                continue
            key = (queue, dst)
            assert value > seen_value.get(key, 0)  # a word never goes back
            seen_value[key] = value
            # Slots are numbered without end here, so that each put can be told from all others.
            assert arrived[queue] >= set(range(implied[(*key, value)]))

    for step in range(400):
        queue = choose.randrange(num_queues)
        if choose.random() < 0.55:
            count = choose.randint(1, 3)
            first = num_puts[queue]
            # A ring's end: the next put does not continue this one.
            gap = queue * (1 << 30) * 16
            wrap = (first // num_slots) * (1 << 32)
            count = min(count, num_slots - first % num_slots)
            backlog.push(
                queue=queue, dst=gap + wrap + first * SLOT, src=gap + wrap + first * SLOT,
                num_bytes=count * SLOT, value=0, now_ns=now,
            )  # fmt: skip
            num_puts[queue] += count
            bytes_in += count * SLOT
        else:
            word = WORDS + choose.randrange(3) * 8
            value = step + 1
            implied[(queue, word, value)] = num_puts[queue]
            last_value[(queue, word)] = value
            backlog.push(queue=queue, dst=word, src=0, num_bytes=0, value=value, now_ns=now)
        now += choose.randrange(40)
        if choose.random() < 0.3:
            advance()
    for _ in range(10_000):
        if backlog.is_empty:
            break
        now += 20
        advance()
    assert backlog.is_empty and bytes_out == bytes_in
    assert seen_value == last_value


def test_puts_that_continue_each_other_become_one_and_old_values_stay_away() -> None:
    backlog = _simt_tests.RailBacklog(1, 0.0)
    for row in range(4):
        backlog.push(
            queue=0, dst=row * SLOT, src=4096 + row * SLOT, num_bytes=SLOT, value=0, now_ns=0
        )
        backlog.push(queue=0, dst=WORDS, src=0, num_bytes=0, value=row + 1, now_ns=0)
    moved = [*backlog.advance(0), *backlog.advance(0)]
    assert moved == [(0, 0, 4096, 4 * SLOT, 0), (0, WORDS, 0, 0, 4)]
    assert backlog.is_empty and backlog.advance(0) == []


def test_puts_become_one_ahead_of_the_signals_between_them_which_leave_together() -> None:
    backlog = _simt_tests.RailBacklog(1, 0.0)
    for row in range(5):
        backlog.push(
            queue=0, dst=row * SLOT, src=4096 + row * SLOT, num_bytes=SLOT, value=0, now_ns=0
        )
        backlog.push(queue=0, dst=WORDS + 8 * row, src=0, num_bytes=0, value=7, now_ns=0)
    assert backlog.advance(0) == [(0, 0, 4096, 5 * SLOT, 0)]
    assert backlog.advance(0) == [(0, WORDS + 8 * row, 0, 0, 7) for row in range(5)]
    assert backlog.is_empty


def test_neighbours_become_one_put_in_whatever_order_they_come() -> None:
    backlog = _simt_tests.RailBacklog(1, 0.0)
    for row in (2, 5, 1, 3, 4):  # 4 joins what 3 has joined; 5 stays by itself, it came before
        backlog.push(
            queue=0, dst=row * SLOT, src=4096 + row * SLOT, num_bytes=SLOT, value=0, now_ns=0
        )
        backlog.push(queue=0, dst=WORDS + 8 * row, src=0, num_bytes=0, value=7, now_ns=0)
    assert backlog.advance(0) == [(0, SLOT, 4096 + SLOT, 3 * SLOT, 0)]
    assert backlog.advance(0) == [(0, WORDS + 16, 0, 0, 7)]
    assert backlog.advance(0) == [(0, 4 * SLOT, 4096 + 4 * SLOT, 2 * SLOT, 0)]
    assert backlog.advance(0) == [(0, WORDS + 8 * row, 0, 0, 7) for row in (5, 1, 3, 4)]
    assert backlog.is_empty


def test_a_put_is_no_larger_than_others_may_wait_for() -> None:
    backlog = _simt_tests.RailBacklog(1, 0.0)
    size = backlog.max_put_bytes // 2 + SLOT
    for part in range(3):
        backlog.push(queue=0, dst=part * size, src=part * size, num_bytes=size, value=0, now_ns=0)
    assert [op[3] for _ in range(3) for op in backlog.advance(0)] == [size] * 3


def test_a_speed_is_kept_and_the_wire_never_idles() -> None:
    """One byte a nanosecond; asked late, it goes on from where the wire would be."""
    backlog = _simt_tests.RailBacklog(2, 1e9)
    for queue in range(2):
        for part in range(5):  # apart, so that nothing is put together
            backlog.push(queue=queue, dst=part * 4096, src=0, num_bytes=1000, value=0, now_ns=0)
        backlog.push(queue=queue, dst=WORDS, src=0, num_bytes=0, value=1, now_ns=0)
    left: list[int] = []
    ends: dict[int, int] = {}  # of a queue's last put, at this speed
    signals: dict[int, int] = {}
    for now in range(0, 20_000, 300):
        for queue, _, _, num_bytes, _ in backlog.advance(now):
            if num_bytes:
                left.append(now)
                ends[queue] = 1000 * len(left)
            else:
                signals[queue] = now
    assert len(left) == 10 and set(signals) == {0, 1}
    # Each put leaves at the first look after the one before has left: 1000 ns of wire each.
    assert left == [-(-1000 * number // 300) * 300 for number in range(10)]
    assert max(ends.values()) == 10_000
    assert all(ends[queue] <= signals[queue] < ends[queue] + 300 for queue in range(2))


def test_an_idle_wire_lends_nothing() -> None:
    backlog = _simt_tests.RailBacklog(1, 1e9)
    backlog.push(queue=0, dst=0, src=0, num_bytes=1000, value=0, now_ns=50_000)
    assert len(backlog.advance(50_000)) == 1
    backlog.push(queue=0, dst=8192, src=0, num_bytes=1000, value=0, now_ns=50_100)
    assert backlog.advance(50_900) == [] and len(backlog.advance(51_000)) == 1


@pytest.mark.parametrize("ahead_ns", [0, 150, 5000])
def test_told_ahead_of_their_time_operations_keep_the_same_times(ahead_ns: int) -> None:
    """A byte a nanosecond; puts of 100, the second of each queue behind both first ones."""
    backlog = _simt_tests.RailBacklog(2, 1e9, ahead_ns)
    for row in range(2):
        for queue in range(2):
            at = (queue + 2) * (1 << 20) + row * 4096
            backlog.push(queue=queue, dst=at, src=at, num_bytes=100, value=0, now_ns=1000)
            backlog.push(queue=queue, dst=WORDS, src=0, num_bytes=0, value=row + 1, now_ns=1000)
    told: dict[tuple[int, int, int], int] = {}
    puts: list[int] = []  # when the last of each has left
    now = 1000
    while not backlog.is_empty:
        for queue, num_bytes, at in backlog.advance(now, with_times=True):
            assert max(at, now) - now <= ahead_ns + (100 if num_bytes else 0)
            if num_bytes:
                puts.append(at)
            else:
                assert at in puts
            told[(queue, num_bytes, at)] = now
        now += 10
    assert puts == [1100, 1200, 1300, 1400]
    assert len(told) == 6
    if ahead_ns == 5000:
        assert max(told.values()) < 1100  # a step of each queue at a time


@pytest.mark.parametrize("ahead_ns", [0, 700, 100_000])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_speed_puts_leave_in_the_order_in_which_they_were_asked_for(
    seed: int, ahead_ns: int
) -> None:
    """Of whatever queue, though one has many; nor do signals between them change that."""
    choose = random.Random(seed)
    backlog = _simt_tests.RailBacklog(5, 1e9, ahead_ns)
    asked: list[int] = []
    left: list[int] = []
    now = 0
    while len(left) < 200:
        for _ in range(choose.randrange(8) if len(asked) < 200 else 0):
            queue = min(choose.randrange(10), 4)
            asked.append(len(asked) * 4096)
            backlog.push(
                queue=queue, dst=asked[-1], src=0, num_bytes=100, value=0, now_ns=now
            )  # apart, so that nothing is put together
            if choose.random() < 0.7:
                backlog.push(
                    queue=queue, dst=WORDS + asked[-1], src=0, num_bytes=0, value=1, now_ns=now
                )
        left += [dst for _, dst, _, num_bytes, _ in backlog.advance(now) if num_bytes]
        now += 60
    assert left == asked[: len(left)]
