"""Where ranks and experts live: nodes, and the map from experts to ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from deep_comm.errors import TopologyError
from deep_comm.settings import env, integers

MAX_RANKS_PER_NODE = 8


def num_local_experts(rank: int, num_experts: int, num_ranks: int) -> int:
    """Experts that ``rank`` holds: the first ``num_experts % num_ranks`` ranks hold one more."""
    return num_experts // num_ranks + (rank < num_experts % num_ranks)


def first_expert(rank: int, num_experts: int, num_ranks: int) -> int:
    """Global index of the first expert that ``rank`` holds; its experts are contiguous."""
    return rank * (num_experts // num_ranks) + min(rank, num_experts % num_ranks)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def host_identity() -> str:
    """One string per machine; DEEP_COMM_HOST_NAME makes several of one.

    The host name alone does not do: machines that never got one are all called ``localhost``.
    The boot id alone does not either: containers of one machine share it, but not ``/dev/shm``.
    """
    name = env.HOST_NAME.get()
    return f"{socket.gethostname() if name is None else name}/{_boot_id()}"


def memory_identity() -> str:
    """One string per shared memory of a machine, whatever its processes call that machine."""
    try:
        device = os.stat("/dev/shm").st_dev
    except OSError:
        return host_identity()
    return f"{_boot_id()}/{device}"


def process_identity() -> str:
    """One string per process of the job. Containers of one name may number processes anew."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbering = ""
    return f"{host_identity()}/{numbering}/{os.getpid()}"


def member_identity(in_process: bool) -> str:
    """Names one rank among all processes of the job, and among the rank threads of a process."""
    thread = f"/{threading.get_native_id()}" if in_process else ""
    return f"{process_identity()}{thread}"


@dataclass(frozen=True)
class Topology:
    """Ranks of one group, ``ranks_per_node`` consecutive ones to a node."""

    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Index of ``rank`` in its node."""
        return rank % self.ranks_per_node

    def node_members(self, rank: int) -> range:
        """The ranks of the node of ``rank``."""
        first = self.node(rank) * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def rail_members(self, rank: int) -> range:
        """The ranks of the local index of ``rank``, one a node."""
        return range(self.local_rank(rank), self.num_ranks, self.ranks_per_node)


def requested_ranks_per_node(argument: int | None) -> int | None:
    """The caller's ``ranks_per_node``, else that of the environment, else None: discover it."""
    value = env.RANKS_PER_NODE.get() if argument is None else argument
    return None if value is None else integers.require("ranks_per_node", value, 1)


def discover(hosts: Sequence[str], ranks_per_node: int | None = None) -> Topology:
    """Topology of a group whose rank ``r`` runs on ``hosts[r]``.

    ``ranks_per_node`` overrides what the host names say, so that the ranks of one machine can stand
    for several logical nodes. LOCAL_WORLD_SIZE is not asked: it describes the world, and the group
    may be any part of it.
    """
    num_ranks = len(hosts)
    if ranks_per_node is None:
        ranks_per_node = sum(host == hosts[0] for host in hosts)
        nodes = [hosts[i : i + ranks_per_node] for i in range(0, num_ranks, ranks_per_node)]
        is_even = all(len(set(node)) == 1 and len(node) == ranks_per_node for node in nodes)
        if not is_even or len(set(hosts)) != len(nodes):
            raise TopologyError(
                f"ranks are not spread evenly over the hosts in rank order: {list(hosts)}; "
                "put the same number of consecutive ranks on every host or pass ranks_per_node"
            )
    ranks_per_node = min(ranks_per_node, num_ranks)
    if num_ranks % ranks_per_node != 0:
        raise TopologyError(
            f"a group of {num_ranks} ranks cannot be split into nodes of {ranks_per_node} ranks"
        )
    return Topology(num_ranks=num_ranks, ranks_per_node=ranks_per_node)


def require_supported(topology: Topology) -> None:
    """Raise TopologyError if a node has more ranks than kernels serve."""
    if topology.ranks_per_node > MAX_RANKS_PER_NODE:
        raise TopologyError(
            f"the group has {topology.ranks_per_node} ranks in one node; at most "
            f"{MAX_RANKS_PER_NODE} are supported (ranks_per_node= makes several logical nodes of "
            "one)"
        )


def sharing_ranks(devices: Sequence[str | None], rank: int) -> list[int]:
    """The ranks whose device is that of ``rank``; [] if it has it alone, or has none."""
    own = devices[rank]
    found = [peer for peer, device in enumerate(devices) if device == own and own is not None]
    return found if len(found) > 1 else []
