"""Which rail joins the nodes of a Buffer's group."""

from __future__ import annotations

from collections.abc import Sequence

from deep_comm.errors import ArgumentError, TopologyError
from deep_comm.ranks.topology import Topology
from deep_comm.settings import env

RAILS = env.RAILS
SIMULATED, SOFTWARE, NVSHMEM = RAILS
OF_DEVICE = {"cpu": (SIMULATED,), "cuda": (SOFTWARE, NVSHMEM)}


def requested(argument: str | None) -> str | None:
    """The caller's ``rail``, else that of the environment, else None: choose."""
    if argument is None:
        return env.RAIL.get()
    if argument not in RAILS:
        raise ArgumentError("rail", repr(argument), f"must be one of {', '.join(RAILS)}")
    return argument


def choose(
    wanted: str | None, device_type: str, topology: Topology, hosts: Sequence[str]
) -> str | None:
    """The rail of a group whose rank ``r`` runs on ``hosts[r]``; None inside one node.

    Without a wish: NVSHMEM between hosts; between the logical nodes of one host the software NIC,
    which needs nothing to be installed; on the host target there is only the simulated network.
    """
    if topology.num_nodes == 1:
        return None
    possible = OF_DEVICE[device_type]
    spans_hosts = len(set(hosts)) > 1
    name = wanted if wanted is not None else NVSHMEM if spans_hosts else possible[0]
    if name not in possible and (wanted is not None or not spans_hosts):
        target = "the host target" if device_type == "cpu" else "CUDA devices"
        raise ArgumentError("rail", repr(name), f"must be {' or '.join(possible)} on {target}")
    if spans_hosts and (name != NVSHMEM or device_type != "cuda"):
        raise TopologyError(
            f"the group spans {topology.num_nodes} nodes ({topology.num_ranks} ranks, "
            f"{topology.ranks_per_node} per node) on {len(set(hosts))} hosts; only CUDA "
            "devices with rail='nvshmem' reach other hosts, the other rails join logical nodes of "
            "one host (ranks_per_node=)"
        )
    return name
