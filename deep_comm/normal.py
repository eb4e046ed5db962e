"""The methods of Buffer that move rows: dispatch and combine as training and prefill want them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deep_comm.config import Config
from deep_comm.context import Context
from deep_comm.events import EventOverlap, event_of_call
from deep_comm.handle import Handle, InternodeHandle
from deep_comm.log import warn_of_lost_gradient
from deep_comm.results import CombineResult, DispatchLayout, DispatchResult, named
from deep_comm.tuning import DEFAULT_NUM_SMS, DefaultConfig, Defaults


class NormalCalls:
    """Dispatch and combine for any number of tokens, inside a node or between nodes.

    R ranks, T tokens of this rank, H hidden, K top-k, E experts, L local experts, N received rows.
    """

    num_sms: int = DEFAULT_NUM_SMS
    """SMs of the recommended configs; see set_num_sms. Until it is set, calls without a Config get
    as many as was measured to be best, or a model says (docs/guide/sms.md).
    """

    _context: Context
    _defaults: Defaults

    def _default(self, operation: str) -> tuple[Config | DefaultConfig, bool]:
        return self._defaults.choose(operation, self.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchLayout:
        """Count the tokens that go to each rank and expert. Local: no peer takes part.

        Args:
            topk_idx: int64 or int32 [T, K], global expert indices; -1: no selection. An expert may
                stand in a row twice.
            num_experts: E.
            previous_event, async_finish, allocate_on_comm_stream: as of dispatch.

        Returns:
            DispatchLayout, a named tuple: num_tokens_per_rank, num_tokens_per_rdma_rank,
            num_tokens_per_expert, is_token_in_rank, event.

        Raises:
            ArgumentError: nothing was launched.
            ExpertIndexError: an index is out of range. On CUDA devices dispatch raises it, on all
                ranks.

        Examples:
            >>> layout = buffer.get_dispatch_layout(topk_idx, num_experts=E)
            >>> num_copies = layout.is_token_in_rank.sum()
        """
        event = None
        if previous_event is not None or allocate_on_comm_stream:
            event = event_of_call(previous_event, async_finish, allocate_on_comm_stream)
        made = self._context.get_dispatch_layout(
            topk_idx, num_experts, event, async_finish, allocate_on_comm_stream
        )
        return named(DispatchLayout, made)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Handle | InternodeHandle | Sequence[Tensor] | None = None,
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
        expand: bool = False,
        zero_padding: bool = False,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        column_major_scales: bool = False,
    ) -> DispatchResult:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: [T, H] of any dtype, contiguous, rows of a multiple of 16 bytes; or (x, scales) with
                scales [T, S] of 1, 2, 4 or 8 bytes each, any strides. All ranks have the same
                dtypes; T may differ between ranks and be 0.
            handle: of an earlier dispatch: repeat its routing with this x (cached dispatch). Omit
                the layout and top-k arguments then.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from get_dispatch_layout.
                Omit all of them if topk_idx and num_experts are given. Tokens go where
                is_token_in_rank says. num_tokens_per_expert makes the returned counts. With expand
                inside a node both are computed anew from topk_idx; between nodes counts that are
                too small end with CapacityError.
            num_tokens_per_rank, num_tokens_per_rdma_rank: only their form is checked.
            topk_idx: int64 or int32 [T, K]; travels with the tokens. On all ranks, or on none.
            topk_weights: float32 [T, K]; travels with topk_idx. On all ranks, or on none.
            expert_alignment: the returned counts are rounded up to multiples of it.
            num_worst_tokens: if positive, N is this number and the host waits for nothing. Rows
                past the received ones have index -1 and weight 0, and their payload is not written.
                The handle has the counts on the device: num_recv_tokens_tensor [1],
                num_recv_tokens_per_rank [R], num_recv_tokens_per_expert [L].
            zero_tail: write zeros to those rows, and to their scales.
            config: rings and SMs. Default: the recommended ones, shrunk to num_nvl_bytes.
            previous_event: start after this event, not after the current stream.
            async_finish: run on the Buffer's own stream and return an event to wait for.
            allocate_on_comm_stream: outputs belong to that stream. Needs the two before.
            num_experts: E; with topk_idx instead of the three of the layout.
            expand: return rows grouped by local expert, one per selection, for grouped GEMMs:
                recv_x [M, H] (scales [M, S]), recv_topk_idx [M] the local expert of a row,
                recv_topk_weights [M] its weight; -1 and 0 where a row belongs to no token.
                ``handle.expansion`` says which rows are whose. Groups start at multiples of
                expert_alignment, which must be equal on all ranks. Needs topk_idx. M is the sum of
                the returned counts, or num_worst_tokens, which must leave room for the padding too.
                The handle remembers it: cached dispatches and combines with it are expanded.
            zero_padding: with expand, rows of no token are zeros. Otherwise they are not written.
            use_fp8: x is bfloat16 [T, H], H a multiple of 128. It travels as e4m3 with one float32
                scale per 128 columns: largest magnitude / 448, at least 1e-4 / 448. recv_x is a
                pair, as if the caller had quantised x. The sender casts each row once.
            round_scale: with use_fp8, scales are rounded up to powers of two.
            use_ue8m0: with round_scale, scales are exponent bytes, four in an int32 [N, ceil(S/4)].
            column_major_scales: scales of 4 bytes, quantised here or given, return stored column by
                column, each column at a multiple of 16 bytes (one more pass over the scales).

        Returns:
            DispatchResult, a named tuple: recv_x, recv_topk_idx, recv_topk_weights,
            num_recv_tokens_per_expert_list, handle, event.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched.
            ConfigMismatch, ExpertIndexError: on all ranks; the Buffer stays usable.
            CapacityError: more rows than num_worst_tokens arrived on this rank.
            PeerTimeout: a peer stayed silent; reset() makes the Buffer usable again.
            MaskedOut: the other ranks go on without this one (``reset(without=...)``).
            CallInterrupted: an earlier call was interrupted; reset() makes the Buffer usable again.

        Examples:
            >>> sent = buffer.dispatch(
            ...     x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=E)
            >>> combined = buffer.combine(sent.recv_x * 2, sent.handle)
            >>> again = buffer.dispatch(2 * x, handle=sent.handle)  # same routing, no host wait
            >>> recv_x, recv_idx, recv_weights, counts, handle, event = sent  # it also unpacks
        """
        event = None
        if getattr(x, "requires_grad", False):
            warn_of_lost_gradient("Buffer.dispatch")
        elif getattr(topk_weights, "requires_grad", False):
            warn_of_lost_gradient("Buffer.dispatch", of="topk_weights")
        if previous_event is not None or allocate_on_comm_stream:
            event = event_of_call(previous_event, async_finish, allocate_on_comm_stream)
        made = self._context.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
            num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens,
            config, event, async_finish, allocate_on_comm_stream, num_experts, zero_tail, expand,
            zero_padding, use_fp8, round_scale, use_ue8m0, column_major_scales,
            None if config is not None else self._default("dispatch"),
        )  # fmt: skip
        return named(DispatchResult, made)

    def combine(
        self,
        x: Tensor,
        handle: Handle | InternodeHandle | Sequence[Tensor],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        apply_weights: bool = False,
        topk_idx: Tensor | None = None,
    ) -> CombineResult:
        """Send rows back to their source and sum those of each token. Collective.

        The sum runs in float32, from the biases over the ranks that got the token, ascending, and
        is rounded once (between nodes also once per node, see InternodeCalls). It does not depend
        on ``config``. A token that went nowhere gives its bias, or zeros. Any number of combines
        may use one handle.

        Args:
            x: bfloat16, float16 or float32 [N, H], contiguous, rows of a multiple of 16 bytes.
            handle: of the dispatch that returned N rows.
            topk_weights: float32 [N, K]; summed in the same way.
            bias: [T, H] of the dtype of x, or a pair of such.
            apply_weights: for the handle of an expanded dispatch, whose x is [M, H] and
                topk_weights [M]: multiply rows by their weights, instead of sending the weights
                back. Either way each rank first adds a token's rows there: in float32, selections
                ascending, products rounded before they are added, the sum rounded to the dtype of x
                once. That row travels, and the sum over ranks is as above.
            topk_idx: int32 or int64 [T, K], of the dispatch: ranks are added in the order of the
                token's last selections there instead of ascending. Between nodes also the nodes;
                with three or more ranks per node all ranks give it, or none.
            config: with as many SMs as the dispatch had. Default: as many; for few rows more, if
                nobody has named a number (docs/guide/sms.md).
            previous_event, async_finish, allocate_on_comm_stream: as of dispatch.

        Returns:
            CombineResult, a named tuple: combined_x, combined_topk_weights, event.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched.
            ConfigMismatch, PeerTimeout, MaskedOut: as dispatch.

        Examples:
            >>> sent = buffer.dispatch(
            ...     x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=E)
            >>> combined = buffer.combine(sent.recv_x, sent.handle, sent.recv_topk_weights)
            >>> y, weights = combined.combined_x, combined.combined_topk_weights
        """
        event = None
        if getattr(x, "requires_grad", False):
            warn_of_lost_gradient("Buffer.combine")
        elif getattr(topk_weights, "requires_grad", False):
            warn_of_lost_gradient("Buffer.combine", of="topk_weights")
        if previous_event is not None or allocate_on_comm_stream:
            event = event_of_call(previous_event, async_finish, allocate_on_comm_stream)
        made = self._context.combine(
            x, handle, topk_weights, bias, config, event, async_finish, allocate_on_comm_stream,
            apply_weights, topk_idx, None if config is not None else self._default("combine"),
        )  # fmt: skip
        return named(CombineResult, made)

    def barrier(self) -> None:
        """Let the ranks' streams wait for each other. Collective.

        Work that any rank gave its current stream, or this Buffer, before the call ends before work
        that any rank gives its current stream after the call begins. The host does not wait. A CUDA
        graph may hold it.

        Raises:
            ConfigMismatch, PeerTimeout, MaskedOut: as dispatch.

        Examples:
            >>> buffer.barrier()
        """
        self._context.barrier(0)
