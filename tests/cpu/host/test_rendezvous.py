"""Rendezvous and topology: groups of every kind, shared failures, disagreement."""

from __future__ import annotations

import collections
import os
import threading
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from run_by import run_by
from torch import distributed

import deep_comm
from deep_comm import ArgumentError, ConfigMismatch, PeerLost, TopologyError, local
from deep_comm.ranks import rendezvous as meetings
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import discover, process_identity, require_supported


class Sent:
    def Test(self) -> bool:
        return True


class FakeComm:
    """The part of an mpi4py communicator that a rendezvous uses."""

    def __init__(self, group: local.ThreadGroup, boxes: dict[Any, Any] | None = None) -> None:
        self._group = group
        # Messages by (source, destination, tag); of all ranks.
        self._boxes = collections.defaultdict(collections.deque) if boxes is None else boxes

    def isend(self, payload: object, dest: int, tag: int) -> Sent:
        self._boxes[self.Get_rank(), dest, tag].append(payload)
        return Sent()

    def iprobe(self, source: int, tag: int) -> bool:
        return len(self._boxes[source, self.Get_rank(), tag]) > 0

    def recv(self, source: int, tag: int) -> object:
        return self._boxes[source, self.Get_rank(), tag].popleft()

    def Get_rank(self) -> int:
        return self._group.rank()

    def Get_size(self) -> int:
        return self._group.size()

    def allgather(self, payload: object) -> list[object]:
        return self._group.all_gather_object(payload)


@run_by(local.run, 3)
def test_a_thread_group_serves(group: local.ThreadGroup, /) -> None:
    rendezvous = Rendezvous(group)
    assert (rendezvous.rank, rendezvous.size) == (group.rank(), 3)
    assert rendezvous.in_process
    assert rendezvous.all_gather_object(group.rank()) == [0, 1, 2]


@run_by(local.run, 2)
def test_an_mpi_communicator_serves(group: local.ThreadGroup, /) -> None:
    rendezvous = Rendezvous(None, FakeComm(group))
    assert not rendezvous.in_process
    assert rendezvous.all_gather_object("x") == ["x", "x"]


def test_ranks_that_do_not_come_over_mpi_are_named_and_a_later_attempt_finds_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = 1.5  # threads that begin together are nearer to each other
    monkeypatch.setattr(meetings, "LEAST_MEETING_S", limit_s)
    boxes: dict[Any, Any] = collections.defaultdict(collections.deque)
    have_met = threading.Barrier(3, timeout=60)

    def main(group: local.ThreadGroup) -> None:
        comm = FakeComm(group, boxes)
        for missing in (1, 0):
            have_met.wait()
            started = time.monotonic()
            if group.rank() != missing:
                with pytest.raises(PeerLost, match=f"rank {missing} did not come"):
                    Rendezvous(None, comm).meet(limit_s)
                assert time.monotonic() - started < 30
            have_met.wait()
            # Ranks that have come and left again are not there: one that is alone names them all.
            if group.rank() == missing:
                others = ", ".join(str(rank) for rank in range(3) if rank != missing)
                with pytest.raises(PeerLost, match=f"rank {others} did not come"):
                    Rendezvous(None, comm).meet(limit_s)
            have_met.wait()
            for _ in range(2):
                Rendezvous(None, comm).meet(60).barrier()

    local.run(main, 3)


@pytest.mark.parametrize(("group", "comm"), [(None, None), ("g", "c"), (object(), None), (None, 3)])
def test_something_else_is_refused(group: object, comm: object) -> None:
    with pytest.raises(ArgumentError):
        Rendezvous(group, comm)


def test_members_tell_groups_of_equal_shape_apart() -> None:
    def main(group: local.ThreadGroup) -> tuple[tuple[str, ...], tuple[str, ...]]:
        pair = group.subgroup([0, 1] if group.rank() < 2 else [2, 3])
        first, again = Rendezvous(pair).members, Rendezvous(pair).members
        assert first == again
        return first

    members = local.run(main, 4)
    assert members[0] == members[1] != members[2] == members[3]


def test_processes_of_one_number_in_two_containers_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = process_identity()
    assert here == process_identity()
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert here != process_identity()


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_in_different_calls_are_told_so(late: int) -> None:
    def main(group: local.ThreadGroup) -> None:
        rendezvous = Rendezvous(group)
        if group.rank() == late:
            rendezvous.all_gather_object(("a", "pair"))
        else:
            rendezvous.all_gather_result("allocate", lambda: 1)

    raised = local.run(main, 2, return_errors=True)[1 - late]
    assert isinstance(raised, ConfigMismatch)
    assert raised.values == {late: "another call", 1 - late: "allocate"}


def _destroyed_groups(world: Any) -> None:
    group = distributed.new_group([0, 1])
    with deep_comm.Buffer(group, 1 << 20, device="cpu") as buffer:
        distributed.destroy_process_group(group)
        with pytest.raises(PeerLost, match="was destroyed"):
            buffer.reset()


def test_a_destroyed_group_is_said_to_be() -> None:
    forked.run(_destroyed_groups, 2)


def _group_of_its_own(world: Any, folder: str) -> Any:
    """As vLLM makes them for ranks that come and go: torch.distributed does not know it."""
    store = distributed.FileStore(f"{folder}/store", world.size())
    group = distributed.ProcessGroup(store, world.rank(), world.size())
    gloo = distributed.ProcessGroupGloo(store, world.rank(), world.size())
    kind = distributed.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, gloo)
    with deep_comm.Buffer(group, 1 << 20, device="cpu") as buffer:
        x = torch.full((1, 64), float(buffer.rank), dtype=torch.bfloat16)
        idx = torch.tensor([[1 - buffer.rank]])
        sent = buffer.dispatch(x, topk_idx=idx, num_experts=2)
        buffer.reset()
        return sent.recv_x[0, 0].item()


def test_a_group_that_torch_does_not_know_serves(tmp_path: Path) -> None:
    assert forked.run(_group_of_its_own, 2, str(tmp_path)) == [1.0, 0.0]


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    def main(group: local.ThreadGroup) -> int:
        rendezvous = Rendezvous(group)

        def step() -> int:
            if group.rank() == 1:
                raise OSError("no space")
            return group.rank()

        return rendezvous.all_gather_result("allocate", step)

    errors = local.run(main, 3, return_errors=True)
    assert isinstance(errors[1], OSError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLost)
        assert "rank 1 failed to allocate" in str(error) and "no space" in str(error)


def test_disagreement_is_raised_on_all_and_names_ranks_and_values() -> None:
    def main(group: local.ThreadGroup) -> None:
        Rendezvous(group).require_equal({"a": 1, "num_nvl_bytes": 100 + group.rank() // 2})

    errors = local.run(main, 3, return_errors=True)
    for error in errors:
        assert isinstance(error, ConfigMismatch)
        assert error.field == "num_nvl_bytes"
        assert error.values == {0: 100, 1: 100, 2: 101}
        assert "rank 2 has 101" in str(error)


def test_equal_hosts_are_one_node() -> None:
    topology = discover(["a"] * 6)
    assert (topology.num_ranks, topology.ranks_per_node, topology.num_nodes) == (6, 6, 1)
    require_supported(topology)


def test_hosts_in_rank_order_are_nodes() -> None:
    topology = discover(["a", "a", "b", "b"])
    assert (topology.ranks_per_node, topology.num_nodes, topology.node(2)) == (2, 2, 1)
    assert (list(topology.node_members(2)), list(topology.rail_members(3))) == ([2, 3], [1, 3])
    require_supported(topology)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "b"]])
def test_uneven_or_mixed_hosts_are_refused(hosts: list[str]) -> None:
    with pytest.raises(TopologyError, match="ranks_per_node"):
        discover(hosts)


def test_ranks_per_node_overrides_host_names() -> None:
    assert discover(["a"] * 8, 4).num_nodes == 2
    assert discover(["a", "b"], 2).num_nodes == 1
    assert discover(["a"] * 3, 8).num_nodes == 1
    with pytest.raises(TopologyError):
        discover(["a"] * 6, 4)


def test_more_than_eight_ranks_in_a_node_are_refused() -> None:
    with pytest.raises(TopologyError, match="at most 8"):
        require_supported(discover(["a"] * 9))
    require_supported(discover(["a"] * 9, 3))
