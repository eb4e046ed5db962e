"""Which rail a Buffer takes, and what NVSHMEM's job and heap do on the host side."""

from __future__ import annotations

import importlib.util
import logging

import pytest
from run_by import run_by

from deep_comm import ArgumentError, Buffer, TopologyError, UnsupportedError, local
from deep_comm.backends import nvshmem
from deep_comm.ranks import rail
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import Topology
from deep_comm.settings import env

ONE_HOST, TWO_HOSTS = ["a"] * 4, ["a", "a", "b", "b"]
TWO_NODES = Topology(4, 2)


def test_inside_one_node_there_is_no_rail() -> None:
    assert rail.choose("nvshmem", "cuda", Topology(4, 4), ONE_HOST) is None


@pytest.mark.parametrize(
    ("wanted", "device", "hosts", "chosen"),
    [
        (None, "cpu", ONE_HOST, "simulated"),
        ("simulated", "cpu", ONE_HOST, "simulated"),
        (None, "cuda", ONE_HOST, "software"),
        ("nvshmem", "cuda", ONE_HOST, "nvshmem"),
        (None, "cuda", TWO_HOSTS, "nvshmem"),
    ],
)
def test_the_rail_follows_from_wish_device_and_hosts(wanted, device, hosts, chosen) -> None:
    assert rail.choose(wanted, device, TWO_NODES, hosts) == chosen


@pytest.mark.parametrize(
    ("wanted", "device", "hosts", "error", "message"),
    [
        ("nvshmem", "cpu", ONE_HOST, ArgumentError, "must be simulated on the host target"),
        ("simulated", "cuda", ONE_HOST, ArgumentError, "software or nvshmem on CUDA devices"),
        ("software", "cuda", TWO_HOSTS, TopologyError, "2 nodes .* on 2 hosts"),
        (None, "cpu", TWO_HOSTS, TopologyError, "2 nodes .* on 2 hosts"),
    ],
)
def test_a_rail_that_cannot_be_is_refused(wanted, device, hosts, error, message) -> None:
    with pytest.raises(error, match=message):
        rail.choose(wanted, device, TWO_NODES, hosts)


def test_an_unknown_name_is_refused_wherever_it_comes_from(monkeypatch) -> None:
    with pytest.raises(ArgumentError, match="rail must be one of simulated, software, nvshmem"):
        rail.requested("infiniband")
    monkeypatch.setenv("DEEP_COMM_RAIL", "ib")
    with pytest.raises(ArgumentError, match="DEEP_COMM_RAIL must be nvshmem, software"):
        rail.requested(None)
    assert rail.requested("software") == "software"  # the argument comes first
    with pytest.raises(ArgumentError, match="DEEP_COMM_RAIL"):
        local.run(lambda group: Buffer(group, 1 << 16, device="cpu"), 1)


@run_by(local.run, 2)
def test_a_buffer_refuses_the_rail_of_another_target(group, /) -> None:
    with pytest.raises(ArgumentError, match="'nvshmem'|got 'nvshmem'"):
        Buffer(group, 1 << 16, 1 << 16, device="cpu", ranks_per_node=1, rail="nvshmem")


def test_what_is_missing_is_named(monkeypatch) -> None:
    present = {"deep_comm._nvshmem", "nvshmem"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in present else None)
    present.discard("nvshmem")
    with pytest.raises(UnsupportedError, match="nvshmem4py.*pip install"):
        nvshmem.load()
    present.clear()
    with pytest.raises(UnsupportedError, match="no NVSHMEM module.*pip install"):
        nvshmem.load()


@run_by(local.run, 2)
def test_threads_are_not_a_job(group, /) -> None:
    with pytest.raises(UnsupportedError, match="a process a rank"):
        nvshmem.join(Rendezvous(group), 0, 4, 1 << 20, ["a", "a"])


UP = nvshmem._State


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([UP(True, b"x", 0, 2), UP(False)], "not on \\[1\\]"),
        ([UP(True, b"x", 0, 4), UP(True, b"x", 1, 4)], "of 4 ranks"),
        ([UP(True, b"x", 0, 2), UP(True, b"y", 1, 2)], "not the NVSHMEM job"),
        ([UP(True, b"x", 0, 2), UP(True, b"x", 0, 2)], "not the NVSHMEM job"),
    ],
)
def test_ranks_of_several_jobs_are_refused(states, message) -> None:
    with pytest.raises(TopologyError, match=message):
        nvshmem.require_one_job(states)


def test_one_job_serves_whoever_started_it_and_in_any_order() -> None:
    nvshmem.require_one_job([UP(True, b"x", 1, 2), UP(True, b"x", 0, 2)])
    nvshmem.require_one_job([UP(True, None, 0, 2), UP(True, None, 1, 2)])


def test_settings_leave_the_users_alone(monkeypatch, caplog) -> None:
    wanted = nvshmem.settings(24, 3 << 30, spans_hosts=True)
    assert wanted["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    assert wanted["NVSHMEM_IBGDA_NUM_RC_PER_PE"] == "24"
    assert int(wanted["NVSHMEM_SYMMETRIC_SIZE"]) > 3 << 30
    assert nvshmem.settings(24, 1, False)["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "256")
    found = {name: (value, was) for name, value, was in env.set_foreign_defaults(wanted)}
    assert found["NVSHMEM_QP_DEPTH"] == ("256", True)
    assert found["NVSHMEM_IB_ENABLE_IBGDA"] == ("1", False)
    assert logging.getLogger("deep_comm.rail") is nvshmem._log


class FakeModule:
    """One PE's symmetric heap; what must be collective is checked afterwards."""

    def __init__(self, pe: int, num_pes: int, capacity: int) -> None:
        self.pe, self.num_pes, self.capacity = pe, num_pes, capacity
        self.collective: list[tuple[str, int]] = []
        self.cleared: list[tuple[int, int]] = []
        self.next = 1024
        self.sizes: dict[int, int] = {}

    def place(self) -> tuple[int, int]:
        return self.pe, self.num_pes

    def settle(self) -> None:
        pass

    def allocate(self, num_bytes: int) -> int:
        self.collective.append(("allocate", num_bytes))
        if sum(self.sizes.values()) + num_bytes > self.capacity:
            return 0
        address, self.next = self.next, self.next + num_bytes
        self.sizes[address] = num_bytes
        return address

    def release(self, address: int) -> None:
        self.collective.append(("release", address))
        del self.sizes[address]

    def clear(self, address: int, num_bytes: int) -> None:
        self.cleared.append((address, num_bytes))


def test_memory_put_aside_serves_the_next_buffer_on_all_ranks_alike() -> None:
    def fn(group):
        rendezvous = Rendezvous(group)
        module = FakeModule(group.rank(), group.size(), 4000)
        job = nvshmem.Job(module, b"x")
        first = job.allocate(rendezvous, 1000)
        second = job.allocate(rendezvous, 600)
        assert (first.address, second.address) == (1024, 2024)
        view = second if group.rank() == 1 else None  # one rank still looks at it
        del first, second
        third = job.allocate(rendezvous, 500)  # so the smaller one is not free everywhere
        assert (third.address, third.num_bytes) == (1024, 500)
        assert module.cleared[-1] == (1024, 500)
        fourth = job.allocate(rendezvous, 500)
        assert fourth.address == 2624  # nothing aside that is common
        del view
        del third
        fifth = job.allocate(rendezvous, 2000)  # what is aside is too small, and goes back
        assert fifth.address == 3124
        return module.collective

    calls = local.run(fn, 3)
    assert calls[0] == calls[1] == calls[2]
    assert calls[0] == [
        ("allocate", 1000), ("allocate", 600), ("allocate", 500), ("release", 1024),
        ("release", 2024), ("allocate", 2000),
    ]  # fmt: skip


@run_by(local.run, 2)
def test_a_full_heap_raises_on_all_ranks(group, /) -> None:
    job = nvshmem.Job(FakeModule(group.rank(), group.size(), 100), b"x")
    with pytest.raises(Exception, match="needs 101 bytes on this rank"):
        job.allocate(Rendezvous(group), 101)


def test_stores_serve_nodes_that_they_reach_as_a_whole(monkeypatch) -> None:
    class Heap(nvshmem.NvshmemHeap):
        def __init__(self) -> None:
            self._topology = Topology(6, 2)
            self.peer_bases = [1024, 2048, 3072, 0, 5120, 6144]
            self._pes = range(6)
            self._qps = 0
            self.base = 1024

            class Job:
                class module:
                    kernels = staticmethod(lambda: 7)

            self._job = Job()

    def bases() -> list[int]:
        return Heap().rail_arguments([0, 2, 4, *range(6)])["rail_bases"]

    monkeypatch.delenv("DEEP_COMM_RAIL_NEAR", raising=False)
    assert bases() == [1024, 0, 5120, 1024, 2048, 0, 0, 5120, 6144]
    assert not Heap().stores_reach([0, 2, 4]) and Heap().stores_reach([0, 4])
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "0")
    assert bases() == [0] * 9 and not Heap().stores_reach([0, 4])
