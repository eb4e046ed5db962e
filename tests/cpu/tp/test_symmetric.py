"""deep_comm.symmetric: tensors of peers, words, and what goes wrong with them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from collectives import ring, verify_ring
from run_by import run_by

from deep_comm import errors, local, processes, simulate, tp
from deep_comm.symmetric import SymmetricMemory


def memory_of(group: Any, num_bytes: int = 1 << 14, **options: Any) -> SymmetricMemory:
    return SymmetricMemory(group, num_bytes, device="cpu", **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_what_was_stored_before_a_signal_is_seen_after_the_wait(num_ranks: int) -> None:
    verify_ring(local.run(ring, num_ranks, timeout_s=60))


def test_the_same_between_processes() -> None:
    verify_ring(processes.run(ring, 2))


@pytest.mark.parametrize("seed", range(4))
def test_the_same_under_a_schedule(seed: int) -> None:
    verify_ring(simulate.run(ring, 3, seed, timeout_s=120))


@run_by(local.run, 3, timeout_s=60)
def test_peers_tensors_are_peers_memory(group: Any, /) -> None:
    with memory_of(group) as memory:
        first = memory.empty((3,), torch.int64)
        second = memory.empty((2, 2), torch.bfloat16)
        first.local.fill_(memory.rank)
        second.local.fill_(memory.rank + 0.5)
        memory.barrier()
        for rank in range(memory.group_size):
            assert first.peer(rank).tolist() == [rank] * 3
            assert (second.peer(rank) == rank + 0.5).all()
        at = memory.bases[memory.rank].item()
        offset = second.local.data_ptr() - at
        for rank in range(memory.group_size):
            assert second.peer(rank).data_ptr() == memory.bases[rank].item() + offset
        memory.barrier()


def test_a_signal_that_never_comes_names_the_peer_and_reset_goes_on() -> None:
    is_over = threading.Event()

    def fn(group: Any) -> None:
        with memory_of(group, timeout_s=0.5) as memory:
            words = memory.words(1)
            if memory.rank == 0:
                with pytest.raises(errors.PeerTimeout) as raised:
                    words.wait(0, 1)
                assert raised.value.peer == 1 and raised.value.kernel == "wait"
                is_over.set()
            else:
                is_over.wait(30)
            memory.reset()
            words.signal(0, 1 - memory.rank)
            words.wait(0, 1 - memory.rank)
            assert words.local.tolist() == [1]

    local.run(fn, 2, timeout_s=60)


@run_by(local.run, 2, timeout_s=60)
def test_a_full_memory_says_how_much_is_needed(group: Any, /) -> None:
    with memory_of(group, 256) as memory:
        memory.empty((30,), torch.float32)  # 128 bytes
        with pytest.raises(errors.BufferTooSmall, match="num_bytes") as raised:
            memory.empty((33,), torch.float32)
        assert raised.value.needed_bytes == 128 + 132
        memory.empty((32,), torch.float32)


@pytest.mark.parametrize(
    "field", ["shape", "dtype", "count of words", "num_bytes", "multicast", "num_sms"]
)
def test_ranks_that_ask_for_different_memory_are_named(field: str) -> None:
    def fn(group: Any) -> None:
        is_odd = group.rank() == 1
        num_bytes = 2048 if field == "num_bytes" and is_odd else 1024
        options = {"multicast": is_odd, "num_sms": 1 + is_odd}
        given = {field: options[field]} if field in options else {}
        with memory_of(group, num_bytes, **given) as memory:
            if field == "count of words":
                memory.words(1 + is_odd)
            else:
                dtype = torch.int32 if field == "dtype" and is_odd else torch.float32
                memory.empty((1 + (field == "shape" and is_odd),), dtype)

    for error in local.run(fn, 2, timeout_s=60, return_errors=True):
        assert isinstance(error, errors.ConfigMismatch) and field in str(error), error


def test_a_rank_in_another_collective_call_is_named() -> None:
    def fn(group: Any) -> None:
        with memory_of(group) as memory:
            if memory.rank == 0:
                memory.words(1)
            else:
                memory.reset()

    error = local.run(fn, 2, timeout_s=60, return_errors=True)[0]
    assert isinstance(error, errors.ConfigMismatch) and "another call" in str(error), error


REFUSED = {
    "rank": lambda memory, words: memory.empty((1,), torch.int8).peer(1),
    "index": lambda memory, words: words.signal(1, 0),
    "peer": lambda memory, words: words.wait(0, 1),
    "count": lambda memory, words: memory.words(0),
    "shape": lambda memory, words: memory.empty((-1,), torch.int8),
    "shape must be a sequence of integers; got 5": lambda memory, words: memory.empty(
        5, torch.int8
    ),
    "shape must be a sequence of integers; got None": lambda memory, words: memory.empty(
        None, torch.int8
    ),
    "dtype must be a torch.dtype; got 'int8'": lambda memory, words: memory.empty((1,), "int8"),
    "dtype must be a torch.dtype; got None": lambda memory, words: memory.empty((1,), None),
}


@pytest.mark.parametrize("argument", REFUSED)
@run_by(local.run, 1, timeout_s=60)
def test_bad_arguments_are_refused(group: Any, /, argument: str) -> None:
    with memory_of(group) as memory:
        words = memory.words(1)
        with pytest.raises(errors.ArgumentError, match=argument):
            REFUSED[argument](memory, words)
        # None has taken memory, nor an agreement.
        assert memory.empty(torch.Size([2]), torch.int8).shape == (2,)


@run_by(local.run, 1, timeout_s=60)
def test_after_destroy_calls_say_so(group: Any, /) -> None:
    memory = memory_of(group)
    box, words = memory.empty((1,), torch.int8), memory.words(1)
    memory.destroy()
    memory.destroy()
    uses = (
        lambda: box.peer(0),
        lambda: words.signal(0, 0),
        memory.barrier,
        lambda: tp.register("a group", memory),
    )
    for use in uses:
        with pytest.raises(errors.BufferDestroyed):
            use()


@run_by(local.run, 2)
def test_memory_of_inference_mode_can_be_written_outside_of_it(group: Any, /) -> None:
    with torch.inference_mode(), SymmetricMemory(group, 1 << 12, device="cpu") as memory:
        box = memory.empty((4,), torch.float32)
        peer = box.peer(1 - memory.rank)
        with torch.inference_mode(False):
            group.barrier()
            peer.fill_(memory.rank)
            memory.reset()
            assert box.local.tolist() == [1.0 - memory.rank] * 4
