"""The calls of a Buffer whose group spans several nodes; Buffer.dispatch and
combine take them by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deep_comm import config as configs
from deep_comm.config import Config
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, TopologyError
from deep_comm.events import EventOverlap
from deep_comm.ops import internode
from deep_comm.ops.call import CallOptions, StreamOptions

if TYPE_CHECKING:
    from deep_comm.internode_handle import InternodeHandle


class InternodeCalls:
    """dispatch and combine over two tiers: N nodes of M ranks, R = N * M.

    A token crosses once to each node that holds one of its experts, to the rank of the sender's
    local index there, which hands it on inside the node. combine adds a token's rows in every node
    before they cross back: in float32 over the node's ranks, ascending, rounded once to the dtype
    of x (the source's own node included), then in float32 over the nodes, ascending, then over the
    biases, and rounded once more. The result does not depend on ``config``.
    """

    _context: Context

    if TYPE_CHECKING:

        def _default_config(self, recommended: configs.Recommend) -> Config: ...

    def _require_several_nodes(self) -> None:
        if self._context.topology.num_nodes == 1:
            raise TopologyError(
                "the group lies inside one node; dispatch and combine serve it, internode_dispatch "
                "and internode_combine serve groups of several nodes (ranks_per_node= makes such)"
            )

    def _options(
        self,
        config: Config | None,
        recommended: configs.Recommend,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> CallOptions:
        return CallOptions(
            config,
            None if config is not None else self._default_config(recommended),
            StreamOptions.checked(previous_event, async_finish, allocate_on_comm_stream),
        )

    def internode_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: InternodeHandle | Sequence[Tensor] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        num_experts: int | None = None,
        zero_tail: bool = False,
    ) -> internode.DispatchResult:
        """What Buffer.dispatch does when the group spans several nodes;
        arguments and results as there.

        The handle is an InternodeHandle, whose first ten fields are also a sequence. In
        worst-case mode ``num_worst_tokens`` also bounds the rows that this rank forwards, unless
        N times its own tokens are more.

        Raises:
            TopologyError: the group lies inside one node. Otherwise as dispatch.
        """
        self._require_several_nodes()
        options = self._options(
            config,
            configs.recommended_dispatch_config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                name = "topk_weights" if topk_idx is None else "topk_idx"
                raise ArgumentError(name, None, "must be left away with a handle")
            return internode.cached_internode_dispatch(self._context, x, handle, options)
        return internode.internode_dispatch(
            self._context,
            x,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            zero_tail=zero_tail,
            options=options,
        )

    def internode_combine(
        self,
        x: Tensor,
        handle: InternodeHandle | Sequence[Tensor],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """What Buffer.combine does when the group spans several nodes;
        arguments and results as there.

        Raises:
            TopologyError: the group lies inside one node. Otherwise as combine.
        """
        self._require_several_nodes()
        options = self._options(
            config,
            configs.recommended_combine_config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )
        return internode.internode_combine(
            self._context, x, handle, topk_weights=topk_weights, bias=bias, options=options
        )

    @property
    def num_nodes(self) -> int:
        """(Logical) nodes of the group."""
        return self._context.topology.num_nodes

    @property
    def ranks_per_node(self) -> int:
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
