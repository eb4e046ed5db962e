"""The simulated machine: seeds, policies, clock, stalls, reports, rank threads."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from simt_machine import Shape, launch, native, run_ranks, simulate, words

POLICIES = ["random", "fifo", "lifo", "starve", "priority", "any"]
SECOND = 1_000_000_000


def fingerprint(seed: int, policy: str) -> tuple[int, int, str]:
    run = simulate(
        "arrival_order", [3], num_ranks=3, seed=seed, policy=policy, shape=Shape(2, 64)
    ).check()
    return run.num_steps, run.time_ns, hashlib.sha256(run.memory.tobytes()).hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_replays_a_run_exactly(policy: str) -> None:
    for seed in range(5):
        assert fingerprint(seed, policy) == fingerprint(seed, policy)


def test_seeds_differ() -> None:
    assert len({fingerprint(seed, "random") for seed in range(10)}) == 10
    assert len({fingerprint(0, policy) for policy in POLICIES[:-1]}) == 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_a_protocol_of_many_ranks_comes_to_its_end(policy: str, seed: int) -> None:
    ranks = 8
    run = simulate(
        "token_ring", [ranks, 10], num_ranks=ranks, seed=seed, policy=policy, shape=Shape(2, 64)
    ).check()
    assert run.memory[0] == ranks * 2 * 64


@pytest.mark.parametrize("policy", POLICIES)
def test_loops_without_hints_come_to_their_end(policy: str) -> None:
    for seed in range(4):
        run = simulate("spin_on_each_other", seed=seed, policy=policy, shape=Shape(2, 32)).check()
        assert run.memory[0] == 64


def test_streams_of_a_rank_run_side_by_side_and_each_in_order() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=1, seed=7)

    def body() -> None:
        # Stream 1 waits for what the second grid of stream 2 sets.
        launch(simulation, memory, "await_word", [5, SECOND], stream=1)
        launch(simulation, memory, "set_word", [4, 0, 0], stream=2)
        launch(simulation, memory, "set_word", [5, 0, 0], stream=2)
        native.synchronize(simulation, 0, 1)
        native.synchronize(simulation, 0, 2)
        native.synchronize(simulation, 0, 3)  # nothing was ever launched there

    assert run_ranks(simulation, [body]) == [None]
    assert memory[8] == 1


def test_grids_of_one_stream_do_not_overlap() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=1, seed=7)

    def body() -> None:
        launch(simulation, memory, "across_grids", [0], shape=Shape(2, 64))
        for _ in range(5):
            launch(simulation, memory, "across_grids", [1], shape=Shape(2, 64))
        native.synchronize(simulation, 0, 0)

    assert run_ranks(simulation, [body]) == [None]
    assert memory[0] == 0


# ---- stuck -----------------------------------------------------------------------------


def test_a_stuck_run_lists_who_waits_for_what_and_how_to_replay_it() -> None:
    run = simulate(
        "await_word", [9, SECOND], num_ranks=2, seed=11, policy="fifo", shape=Shape(2, 64)
    )
    for error in run.errors:
        assert isinstance(error, native.SimulationStuck)
        text = str(error)
        for rank in range(2):
            for block in range(2):
                where = f"kernel 'await_word' rank {rank} block {block} warp"
                assert (
                    f"{where} 0 lane 0: stage=ring_tail word=tail peer=5 channel=3"
                    " expected=9 seen=0" in text
                )
                assert f"{where} 0 lanes 1-31: at sync_block (63 of 64 threads are there)" in text
                assert f"{where} 1 lanes 0-31: at sync_block" in text
        assert "seed 11, policy fifo" in text
        assert "deep_comm simulate --seed 11" in text


def test_a_stuck_machine_stays_stuck() -> None:
    simulation = native.Simulation(num_ranks=1, seed=0)
    memory = words()

    def body() -> None:
        launch(simulation, memory, "await_word", [9, SECOND])
        with pytest.raises(native.SimulationStuck):
            native.synchronize(simulation, 0, 0)
        with pytest.raises(native.SimulationStuck):
            launch(simulation, memory, "set_word", [9, 0, 0])

    assert run_ranks(simulation, [body]) == [None]
    assert "stage=ring_tail" in simulation.describe()


def test_a_livelock_is_stuck_too() -> None:
    simulation = native.Simulation(num_ranks=1, seed=0, policy="random")
    memory = words()

    def body() -> None:
        launch(simulation, memory, "spin_on_word", [1])
        native.synchronize(simulation, 0, 0)

    (error,) = run_ranks(simulation, [body])
    assert isinstance(error, native.SimulationStuck)
    assert "livelock" in str(error)
    assert "ready to run" in str(error)


def test_with_the_clock_a_deadline_ends_the_wait() -> None:
    run = simulate("await_word", [9, 30 * SECOND], num_ranks=2, on_stuck="clock").check()
    assert run.memory[8:10].tolist() == [2, 2]
    assert all(30 * SECOND <= waited < 31 * SECOND for waited in run.memory[16:18].tolist())


@pytest.mark.parametrize("policy", POLICIES)
def test_with_the_clock_a_loop_around_an_mbarrier_reaches_its_deadline(policy: str) -> None:
    run = simulate("await_mbarrier", [10 * SECOND], policy=policy, on_stuck="clock").check()
    assert run.memory[8:40].tolist() == [2] * 32


def test_without_the_clock_a_loop_around_an_mbarrier_is_stuck() -> None:
    (error,) = simulate("await_mbarrier", [10 * SECOND]).errors
    assert isinstance(error, native.SimulationStuck)
    assert "lanes 0-31: waits for parity 0 of the mbarrier at byte 0" in str(error)


def test_an_abort_word_ends_a_wait() -> None:
    memory = words()
    for seed in range(20):
        memory[:] = 0
        simulation = native.Simulation(num_ranks=2, seed=seed, policy="any")

        def waiter(simulation: Any = simulation) -> None:
            launch(simulation, memory, "await_word", [9, SECOND], rank=0)
            native.synchronize(simulation, 0, 0)

        def setter(simulation: Any = simulation) -> None:
            launch(simulation, memory, "set_word", [3, 1, 0], rank=1)
            native.synchronize(simulation, 1, 0)

        assert run_ranks(simulation, [waiter, setter]) == [None, None]
        assert memory[8] == 3


def test_sleepers_wake_in_virtual_time() -> None:
    start = time.monotonic()
    for _ in range(50):
        run = simulate("sleep_well", [4 * SECOND], shape=Shape(2, 32)).check()
        assert (run.memory[:64] >= 4 * SECOND).all()
        assert run.time_ns >= 4 * SECOND
    simulate("wait_for_clock", [1_000_000]).check()
    assert time.monotonic() - start < 100


# ---- stalls, kills ---------------------------------------------------------------------


def test_a_stalled_rank_comes_back() -> None:
    for seed in range(5):
        run = simulate(
            "token_ring",
            [4, 10],
            num_ranks=4,
            seed=seed,
            policy="any",
            stalls=[(1, 50, 500), (2, 10, 10**12)],
        ).check()
        assert run.memory[0] == 4 * 32


def test_a_rank_that_stalls_for_ever_is_missed() -> None:
    run = simulate("token_ring", [2, 10], num_ranks=2, stalls=[(1, 40, 0)])
    assert all(isinstance(error, native.SimulationStuck) for error in run.errors)
    assert "rank 1 is stalled since step 40" in str(run.errors[0])


def test_the_others_see_their_deadline_pass_when_a_rank_is_killed() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=2, seed=3, on_stuck="clock")

    def survivor() -> None:
        launch(simulation, memory, "await_word", [9, SECOND], rank=0)
        native.synchronize(simulation, 0, 0)

    def victim() -> None:
        launch(simulation, memory, "set_word", [9, 0, 0], rank=1)
        simulation.kill(1)
        with pytest.raises(native.MachineError, match="rank 1 was killed"):
            native.synchronize(simulation, 1, 0)

    assert run_ranks(simulation, [survivor, victim]) == [None, None]
    assert memory[8] == 2
    assert "rank 1 was killed" in simulation.describe()


def test_a_rank_can_be_killed_between_its_kernels() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=2, seed=3, on_stuck="clock")

    def survivor() -> None:
        launch(simulation, memory, "await_word", [9, SECOND], rank=0, shape=Shape(2, 64))
        native.synchronize(simulation, 0, 0)

    def victim() -> None:
        # Two grids: the one that ends lets the thread go while the other waits inside.
        launch(simulation, memory, "await_word", [9, 100 * SECOND], rank=1, stream=1)
        launch(simulation, memory, "count_in", [1], rank=1, stream=2)
        native.synchronize(simulation, 1, 2)
        simulation.kill(1)
        simulation.leave(1)

    assert run_ranks(simulation, [survivor, victim]) == [None, None]
    assert memory[8] == 2
    assert memory[9] == 0
    assert simulation.time_ns < 50 * SECOND


def test_faults_are_handed_to_the_kernels() -> None:
    names = [
        "weaken_release", "weaken_fence", "skip_credit", "skip_bulk_wait", "skip_bulk_wait_read",
        "skip_entry_barrier",
    ]  # fmt: skip
    for bit, name in enumerate(names):
        assert simulate("faults", faults=[name]).check().memory[0] == 1 << bit
    assert simulate("faults", faults=[names[0], names[3]]).check().memory[0] == 0b1001
    assert simulate("faults").check().memory[0] == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_ranks": 0}, "num_ranks = 0"),
        ({"policy": "kind"}, "policy = 'kind'"),
        ({"on_stuck": "shrug"}, "on_stuck = 'shrug'"),
        ({"faults": ["gravity"]}, "'gravity' is none of weaken_release"),
        ({"stalls": [(2, 0, 0)]}, "rank 2 is not in"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.Simulation(**{"num_ranks": 2, "seed": 0, **options})


# ---- rank threads ----------------------------------------------------------------------


def test_exchange_gathers_from_all_ranks() -> None:
    simulation = native.Simulation(num_ranks=4, seed=0)
    seen: list[list[bytes]] = [[] for _ in range(4)]

    def body(rank: int) -> Any:
        def run() -> None:
            for round_ in range(20):
                if rank == round_ % 4:
                    time.sleep(0.001)
                got = simulation.exchange(rank, bytes([rank, round_, 0]))
                assert got == [bytes([peer, round_, 0]) for peer in range(4)]
                seen[rank].extend(got)

        return run

    assert run_ranks(simulation, [body(rank) for rank in range(4)]) == [None] * 4
    assert seen[0] == seen[3]


def test_exchange_with_a_rank_that_has_left_is_stuck() -> None:
    simulation = native.Simulation(num_ranks=3, seed=0)

    def stay(rank: int) -> Any:
        return lambda: simulation.exchange(rank, b"")

    errors = run_ranks(simulation, [stay(0), lambda: None, stay(2)])
    assert [type(error) for error in errors] == [
        native.SimulationStuck,
        type(None),
        native.SimulationStuck,
    ]
    assert "rank 1 has left" in str(errors[0])


def test_exchange_and_kernels_alternate() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=2, seed=1, policy="any")
    order: list[list[bytes]] = []

    def body(rank: int) -> Any:
        def run() -> None:
            for round_ in range(1, 11):
                launch(simulation, memory, "token_ring", [2, 2], rank=rank)
                native.synchronize(simulation, rank, 0)
                got = simulation.exchange(rank, str(memory[0]).encode())
                if rank == 0:
                    order.append(got)
                    memory[64:] = 0
                assert memory[0] == 64 * round_
                simulation.exchange(rank, b"")

        return run

    assert run_ranks(simulation, [body(0), body(1)]) == [None, None]
    assert len(order) == 10


def test_threads_act_only_while_no_fiber_does() -> None:
    """However the operating system schedules the rank threads, the run is the same."""

    def run(delays: list[float]) -> tuple[int, bytes]:
        memory = words()
        simulation = native.Simulation(num_ranks=3, seed=5, policy="random")

        def body(rank: int) -> Any:
            def rank_main() -> None:
                for round_ in range(4):
                    time.sleep(delays[(rank + round_) % 3])
                    launch(simulation, memory, "arrival_order", [1], rank=rank)
                    native.synchronize(simulation, rank, 0)

            return rank_main

        assert run_ranks(simulation, [body(rank) for rank in range(3)]) == [None] * 3
        return simulation.num_steps, memory.tobytes()

    first = run([0, 0, 0])
    assert first == run([0.004, 0, 0.002])
    assert first == run([0, 0.003, 0.001])


def test_an_error_in_one_rank_reaches_all() -> None:
    memory = words()
    simulation = native.Simulation(num_ranks=2, seed=0)

    def body(kernel: str, rank: int) -> Any:
        def run() -> None:
            launch(simulation, memory, kernel, [1, SECOND], rank=rank, shape=Shape(2, 64))
            native.synchronize(simulation, rank, 0)

        return run

    errors = run_ranks(simulation, [body("trapped", 0), body("await_word", 1)])
    for error in errors:
        assert type(error) is native.MachineError
        assert "kernel 'trapped' rank 0 block 1 warp 1 lane 5: trap" in str(error)


def test_calls_of_a_rank_that_has_left_are_refused() -> None:
    simulation = native.Simulation(num_ranks=1, seed=0)
    simulation.leave(0)
    simulation.leave(0)
    with pytest.raises(ValueError, match="rank 0 has left"):
        simulation.exchange(0, b"")
    with pytest.raises(ValueError, match="rank = 1, but it is in"):
        simulation.leave(1)


def test_simulations_live_side_by_side() -> None:
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(fingerprint, i, "random") for i in range(3)]
    assert [each.result() for each in results] == [fingerprint(i, "random") for i in range(3)]


def test_a_simulation_that_nobody_uses_ends_quietly() -> None:
    for seed in range(5):
        simulation = native.Simulation(num_ranks=4, seed=seed)
        launch(simulation, words(), "switches", [5])
        del simulation


def test_results_do_not_depend_on_where_memory_lies() -> None:
    """The model keys its buffers by address; no choice may come from it."""
    results = set()
    for offset in (0, 2, 34, 1026):
        memory = words(8192)[offset:]
        run = simulate("coherence", [40], num_ranks=2, seed=9, memory=memory).check()
        results.add((run.num_steps, run.time_ns))
    assert len(results) == 1
    assert isinstance(memory, np.ndarray)
