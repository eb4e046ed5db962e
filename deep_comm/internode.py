"""What a Buffer has beside dispatch and combine when its group spans several nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from deep_comm.errors import TopologyError
from deep_comm.normal import NormalCalls

P = ParamSpec("P")
R = TypeVar("R")


def _between_nodes(
    method: Callable[Concatenate[NormalCalls, P], R], name: str
) -> Callable[Concatenate[InternodeCalls, P], R]:
    """``method`` by DeepEP's name for it in groups of several nodes, and for those alone."""

    @functools.wraps(method)
    def call(self: InternodeCalls, *args: P.args, **kwargs: P.kwargs) -> R:
        self._require_several_nodes()
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__qualname__ = f"Buffer.{name}"
    call.__doc__ = f"""{method.__name__}, of a group of several nodes.

        Raises:
            TopologyError: the group lies inside one node. Otherwise as {method.__name__}.
        """
    return cast("Callable[Concatenate[InternodeCalls, P], R]", call)


class InternodeCalls(NormalCalls):
    """dispatch and combine over two tiers: N nodes of M ranks, R = N * M.

    A token crosses once to each node that holds one of its experts, to the rank of the sender's
    local index there. That rank forwards it inside the node.

    combine adds a token's rows in every node before they cross back: in float32 over the node's
    ranks, ascending, rounded once to the dtype of x (the source's own node included). Then it adds
    in float32 from the biases over the nodes, ascending, and rounds once more. ``topk_idx`` gives
    ranks and nodes another order. The result does not depend on ``config``.

    The handle is an InternodeHandle, whose first ten fields are also a sequence. In worst-case mode
    ``num_worst_tokens`` also bounds the rows that this rank forwards, unless N times its own
    tokens, or the most that any rank has brought so far, are more.
    """

    internode_dispatch = _between_nodes(NormalCalls.dispatch, "internode_dispatch")
    internode_combine = _between_nodes(NormalCalls.combine, "internode_combine")

    def _require_several_nodes(self) -> None:
        if self._context.topology.num_nodes == 1:
            raise TopologyError(
                "the group lies inside one node; dispatch and combine serve it, internode_dispatch "
                "and internode_combine serve groups of several nodes (ranks_per_node= makes such)"
            )

    @property
    def num_nodes(self) -> int:
        """(Logical) nodes of the group."""
        return self._context.topology.num_nodes

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the group in a (logical) node."""
        return self._context.topology.ranks_per_node

    @property
    def rail_put_bytes(self) -> list[list[int]]:
        """Bytes that this rank has put on the rail so far, by node and queue."""
        self._context.require_open()
        counted: Any = self._context.engine.rail_put_bytes
        topology, num_qps = self._context.topology, self._context.num_qps
        # By peer: the nodes first, then with low-latency mode all ranks.
        peers = [counted[begin : begin + num_qps] for begin in range(0, len(counted), num_qps)]
        totals = [list(queues) for queues in peers[: topology.num_nodes]]
        for rank, queues in enumerate(peers[topology.num_nodes :]):
            node = totals[topology.node(rank)]
            node[:] = [total + more for total, more in zip(node, queues, strict=True)]
        return totals
