"""Sizes of an ElasticBuffer: nodes and ranks of its group, bytes, and how they are shared out."""

from __future__ import annotations

import math
from typing import Any

from deep_comm.context.shape import IMBALANCE
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import (
    MAX_RANKS_PER_NODE,
    Topology,
    requested_ranks_per_node,
)
from deep_comm.settings import integers
from deep_comm.settings.buffer import RING_BYTES
from deep_comm.tuning import DEFAULT_NUM_SMS, RECOMMENDED

_SIZE_ALIGNMENT = 2 << 20
_ROW_BYTES = 16


def topology_of(group: Any, timeout_s: float | None = None) -> Topology:
    """Collective; see Rendezvous.meet for the time."""
    return Rendezvous(group).meet(timeout_s).topology(None)


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks per node) of ``group``. Collective."""
    topology = topology_of(group)
    return topology.num_nodes, topology.ranks_per_node


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of ``group``: two tiers in hybrid mode, else one.
    Collective."""
    return logical_domain(topology_of(group), allow_hybrid_mode)


def logical_domain(topology: Topology, allow_hybrid_mode: bool) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks)."""
    if allow_hybrid_mode:
        return topology.num_nodes, topology.ranks_per_node
    return 1, topology.num_ranks


def ring_bytes(topology: Topology, row_bytes: int) -> tuple[int, int]:
    """Bytes inside a node and between nodes that the recommended configs of a Buffer want."""
    num_ranks = topology.num_ranks
    wanted = [recommended(num_ranks, DEFAULT_NUM_SMS) for recommended in RECOMMENDED.values()]
    shape = (row_bytes, num_ranks, topology.ranks_per_node)
    return (
        max(config.ring_bytes(*shape) for config in wanted),
        max(config.get_rdma_buffer_size_hint(*shape) for config in wanted),
    )


def size_hint(
    num_ranks: int, num_max_tokens_per_rank: int, hidden: int, num_topk: int, use_fp8_dispatch: bool
) -> int:
    """Rings, and a receive region for the rows of a dispatch and, while they live, of its combine:
    R * M rows, or as many as expanded rows of uniform routing and a quarter more; and those that
    return for M tokens. Between nodes as much for places in both tiers, or what their rings want,
    whichever is more.

    Asks nobody: hosts are taken to hold DEEP_COMM_RANKS_PER_NODE ranks, else as many as can be.
    """
    for name, value in (("num_max_tokens_per_rank", num_max_tokens_per_rank), ("hidden", hidden)):
        integers.require(name, value, 1, note=" (or give num_bytes)")
    integers.require("num_topk", num_topk, 0)
    scales = integers.round_up(-(-hidden // 128) * 4, _ROW_BYTES) if use_fp8_dispatch else 0
    row_bytes = hidden + scales if use_fp8_dispatch else 2 * hidden
    metadata_bytes = 12 * num_topk + 4
    num_sent = max(float(num_ranks), IMBALANCE * num_topk)  # of a token
    num_returned = min(num_ranks - 1, num_topk or num_ranks)
    per_token = num_sent * (row_bytes + metadata_bytes) + num_returned * (
        2 * hidden + metadata_bytes
    )
    region = math.ceil(num_max_tokens_per_rank * per_token)
    # From twice RING_BYTES on a Buffer makes all but RING_BYTES its receive region.
    num_bytes = RING_BYTES + max(RING_BYTES, region)
    ranks_per_node = requested_ranks_per_node(None) or MAX_RANKS_PER_NODE
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node == 0:
        # Combine's rows are bfloat16, whatever dispatch's are.
        rings = ring_bytes(Topology(num_ranks, ranks_per_node), 2 * hidden)
        num_bytes = max(num_bytes, sum(rings))
    return integers.round_up(num_bytes, _SIZE_ALIGNMENT)


def shared_out(num_bytes: int, topology: Topology, hidden: int) -> tuple[int, int]:
    """(num_nvl_bytes, num_rdma_bytes) of the engine's Buffer: in the proportion of the rings'
    wants."""
    if topology.num_nodes == 1:
        return num_bytes, 0
    inside, between = ring_bytes(topology, 2 * (hidden or 4096))
    rail = integers.round_up(num_bytes * between // (inside + between))
    return num_bytes - rail, rail
