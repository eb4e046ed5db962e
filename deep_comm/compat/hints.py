"""DeepEP's number for low-latency memory, and what deep_comm takes instead.

Programs compare the hint with a formula of their own, so it must be DeepEP's, which grows with the
number of experts. deep_comm needs tokens times ranks. The drop-in returns the former, remembers the
shape it was asked for, and allocates the latter when a Buffer is built with that number.
"""

from __future__ import annotations

from deep_comm.compat.elastic_sizes import ring_bytes
from deep_comm.context.low_latency_region import region_bytes
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import Topology, discover, host_identity, requested_ranks_per_node
from deep_comm.settings import env, integers

_ALIGNMENT = 128
Shape = tuple[int, int, int]  # ranks, tokens per rank, hidden
_hinted: dict[int, set[Shape]] = {}  # by DeepEP's bytes, of every hint asked for in this process


def low_latency_bytes(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """DeepEP's size, to the byte; remembers what deep_comm needs for the same shape.

    Twice a send area, a receive area and a word per expert: a dispatch message has 16 bytes before
    its bfloat16 row, a combine message a pair of bfloat16 per 128 columns before it.
    """
    dispatch_bytes = 16 + 2 * hidden
    combine_bytes = 2 * hidden + hidden // 128 * 4
    send = max(num_max_tokens * dispatch_bytes, num_experts * num_max_tokens * combine_bytes)
    receive = num_experts * num_max_tokens * max(dispatch_bytes, combine_bytes)
    signals = integers.round_up(4 * num_experts, _ALIGNMENT)
    total = 2 * (send + receive + signals)
    total = integers.round_up(total + 1, _ALIGNMENT)  # DeepEP's adds some always
    _hinted.setdefault(total, set()).add((num_ranks, num_max_tokens, hidden))
    return total


def bytes_to_allocate(
    group: object,
    comm: object,
    num_rdma_bytes: int,
    enable_shrink: bool = False,
    timeout_s: float | None = None,
) -> int:
    """For a low-latency Buffer of ``num_rdma_bytes``. Collective: ranks may have asked for the hint
    on one of them only, and how many nodes there are is not known before."""
    known = set() if env.DEEP_EP_FULL_RDMA.get() else _hinted.get(num_rdma_bytes, set())
    rendezvous = Rendezvous(group, comm).meet(timeout_s)
    told = rendezvous.all_gather_object((sorted(known), host_identity()))
    shapes = {shape for of_rank, _ in told for shape in of_rank}
    if not shapes:
        return num_rdma_bytes
    topology = discover([host for _, host in told], requested_ranks_per_node(None))
    return max(_bytes_of(shape, topology, enable_shrink) for shape in shapes)


def _bytes_of(shape: Shape, topology: Topology, enable_shrink: bool) -> int:
    is_internode = topology.num_nodes > 1
    needed = region_bytes(*shape, is_internode=is_internode, can_shrink=enable_shrink)
    # Between nodes the rings of normal mode get as much as low-latency calls.
    return max(needed, ring_bytes(topology, 2 * shape[2])[1]) if is_internode else needed
