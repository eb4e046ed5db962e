"""Direct mode: real time, real memory that others write, and cores that others need."""

from __future__ import annotations

import threading
import time

import pytest
from simt_machine import Shape, run_direct, words

SECOND = 1_000_000_000


def test_a_wait_ends_when_another_thread_of_the_process_writes() -> None:
    memory = words()
    waiter = threading.Thread(
        target=run_direct,
        args=("await_word", [9, 20 * SECOND]),
        kwargs={"memory": memory, "shape": Shape(2, 64)},
    )
    waiter.start()
    time.sleep(0.05)
    run_direct("set_word", [9, 0, 0], memory=memory)
    waiter.join()
    assert memory[8] == 1


def test_a_wait_ends_at_its_deadline() -> None:
    start = time.monotonic()
    memory = run_direct("await_word", [9, SECOND // 10], shape=Shape(2, 64))
    assert memory[8] == 2
    assert 0.1 <= time.monotonic() - start < 60
    assert memory[16] >= SECOND // 10


def test_a_wait_ends_when_the_abort_word_rises() -> None:
    memory = words()
    waiter = threading.Thread(
        target=run_direct, args=("await_word", [9, 20 * SECOND]), kwargs={"memory": memory}
    )
    waiter.start()
    time.sleep(0.02)
    run_direct("set_word", [0, 1, 0], memory=memory)
    waiter.join()
    assert memory[8] == 3


def test_a_long_wait_leaves_the_core_to_others() -> None:
    before = time.thread_time()
    run_direct("await_word", [9, SECOND // 2], shape=Shape(4, 128))
    assert time.thread_time() - before < 0.25


def test_a_loop_without_a_hint_lets_others_run() -> None:
    memory = words()
    spinner = threading.Thread(
        target=run_direct, args=("spin_on_word", [9]), kwargs={"memory": memory}
    )
    spinner.start()
    run_direct("set_word", [9, 0, 1000], memory=memory)
    spinner.join()


def test_sleep_and_clock() -> None:
    memory = run_direct("sleep_well", [2_000_000], shape=Shape(2, 64))
    assert (memory[:128] >= 2_000_000).all()
    assert (memory[:128] < 60 * SECOND).all()
    run_direct("wait_for_clock", [1_000_000])


def test_a_loop_around_an_mbarrier_sees_its_deadline() -> None:
    memory = run_direct("await_mbarrier", [20_000_000])
    assert memory[8:40].tolist() == [2] * 32


def test_faults_belong_to_simulations() -> None:
    assert run_direct("faults")[0] == 0


@pytest.mark.parametrize("rounds", [3000])
def test_many_launches_in_a_row(rounds: int) -> None:
    memory = words()
    for _ in range(rounds):
        run_direct("count_in", [1], memory=memory, shape=Shape(1, 32))
    assert memory[0] == rounds


def test_memory_must_be_what_the_kernels_take() -> None:
    with pytest.raises(TypeError):
        run_direct("faults", memory=[1, 2])  # type: ignore[arg-type]
