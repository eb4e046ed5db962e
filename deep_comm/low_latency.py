"""The low-latency methods of Buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_comm import _core
from deep_comm.context import Context
from deep_comm.context.low_latency_region import LowLatencyRegion, native_calls, region_bytes
from deep_comm.handle import LowLatencyHandle
from deep_comm.log import logger, warn_of_lost_gradient
from deep_comm.ranks.topology import MAX_RANKS_PER_NODE
from deep_comm.results import LowLatencyCombineResult, LowLatencyDispatchResult, named
from deep_comm.settings import integers


class LowLatencyCalls:
    """Dispatch and combine for decoding: no host wait, fixed shapes, CUDA graphs.

    R ranks, M tokens that a rank may have, T <= M that it has, H hidden, K top-k, E experts, L
    local experts, S = H / 128 scales.

    Calls are collective, as Buffer says. They may be mixed with dispatch and combine in any order.
    They run on the current stream, with ``async_finish`` on the Buffer's own.

    **Hooks.** With ``return_recv_hook`` only the send phase runs now. The returned hook runs the
    receive phase, on the same stream. No SM is held in between. Two calls of a kind may wait for
    their hooks at a time. Hooks may be called in any order, each once. The next but one call of a
    kind is refused until the hook of a call has run.

    **The region** of these calls may be looked at and zeroed between calls, although they leave
    bytes there. If anything else is written there (get_local_buffer_tensor), all ranks call
    clean_low_latency_buffer before the next call.

    **Several nodes.** The same calls give the same results. A receive phase may wait for that of
    another rank of the node, which hands rows on: all ranks call their hooks in the same order.
    one_rounding needs num_rdma_bytes for R * M * K rows more.
    """

    _context: Context
    _low_latency: _core.LowLatencyCalls

    def _enable_low_latency(self) -> None:
        """Make the calls, which say so if the Buffer has no region for them."""
        self._low_latency = calls = native_calls(self._context)
        self._low_latency_region = LowLatencyRegion(self._context, calls)
        # A property makes its function anew.
        self._dispatch_low_latency, self._combine_low_latency = calls.dispatch, calls.combine

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
        *,
        ranks_per_node: int | None = None,
        enable_shrink: bool = False,
    ) -> int:
        """Return num_rdma_bytes for calls up to these sizes, with any top-k and format.

        It grows with tokens and ranks, not with experts.

        Args:
            num_max_dispatch_tokens_per_rank: M.
            hidden: H.
            num_ranks: R.
            num_experts: E.
            ranks_per_node: of a group of several nodes, which needs more. Default: one node, unless
                num_ranks is more than a node has.
            enable_shrink: for a Buffer with rank masks, which needs more from 65 ranks on.

        Returns:
            Bytes on every rank.

        Raises:
            ArgumentError: a size is out of range.

        Examples:
            >>> num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
        """
        for name, value, smallest in (
            ("hidden", hidden, 8),
            ("num_ranks", num_ranks, 1),
            ("num_experts", num_experts, 1),
            ("ranks_per_node", 1 if ranks_per_node is None else ranks_per_node, 1),
        ):
            integers.require(name, value, smallest, integers.LARGEST)
        max_tokens = integers.require(
            "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1,
            _core.max_low_latency_tokens,
        )  # fmt: skip
        per_node = MAX_RANKS_PER_NODE if ranks_per_node is None else ranks_per_node
        is_internode = num_ranks > per_node
        return region_bytes(num_ranks, max_tokens, hidden, is_internode, enable_shrink)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Make the region of low-latency calls zero, if a caller may have written there.

        Nothing needs cleaning after calls of any mode: then this only checks that the sizes would
        fit. With enable_shrink, and once get_local_buffer_tensor has returned the region, it is a
        collective low-latency call on the current stream. It ends when all ranks have begun it. As
        in every such call a silent rank is masked, or raises PeerTimeout without enable_shrink.

        Raises:
            ArgumentError, BufferTooSmall: the sizes would not fit. If it is collective also: the
                hook of a call has not run.
            ConfigMismatch, PeerTimeout, MaskedOut: as of low_latency_dispatch.

        Examples:
            >>> buffer.clean_low_latency_buffer(M, H, E)
        """
        self._low_latency.num_blocks(num_max_dispatch_tokens_per_rank, hidden, 1, num_experts)
        self._low_latency_region.clean()

    def low_latency_num_blocks(
        self,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
    ) -> int:
        """Return the blocks, of one SM each, of the kernels of a BF16 call of this shape.

        Equal on all ranks.

        Raises:
            ArgumentError, BufferTooSmall: as the call would.

        Examples:
            >>> num_sms = buffer.low_latency_num_blocks(M, H, K, E)
        """
        return self._low_latency.num_blocks(
            num_max_dispatch_tokens_per_rank, hidden, num_topk, num_experts
        )

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        compact: bool = False,
        report_num_tokens: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: Tensor | None = None,
        global_topk_idx: bool = False,
    ) -> LowLatencyDispatchResult:
        """Send each token to the ranks of its experts, once per rank. Collective.

        Args:
            x: bfloat16 [T, H], H a multiple of 8, of 128 with use_fp8. T may differ between ranks.
            topk_idx: int64 or int32 [T, K]; -1: no selection. An expert may stand in a row twice:
                the token then has one row with it, which combine adds with both weights.
            num_max_dispatch_tokens_per_rank: M, equal on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: int32 [L], += rows of each expert.
            dispatch_wait_recv_cost_stats: int64 [R], += nanoseconds that one block waited for each
                source.
            use_fp8: cast rows to e4m3 (OCP FP8) with one float32 scale per 128 columns: largest
                magnitude / 448, at least 1e-4 / 448.
            round_scale: scales are rounded up to powers of two.
            use_ue8m0: scales return as exponent bytes (OCP Microscaling's E8M0), four in an int32.
                Needs round_scale.
            use_nvfp4: cast rows to NVFP4 instead, whatever use_fp8 says: e2m1 elements, two in a
                byte, the first in its low half, and one e4m3 scale per 16 of them. H a multiple of
                64. scale = largest magnitude / 6 * x_global_scale, rounded; element = x *
                (x_global_scale / scale), rounded (csrc/device/move/quantise_fp4.cuh): x is nearly
                element * scale / x_global_scale. Of eight negative zeros in a row that begin at a
                multiple of eight, the last returns positive.
            x_global_scale: float32, one element, on the device, with use_nvfp4. Default: 1. As a
                rule 448 * 6 / the largest magnitude of x on any rank. Smaller is safe, larger
                saturates.
            global_topk_idx: of compact rows, handle.recv_topk_idx has global indices, for experts
                that map them to local ones: all of them valid. Where no local expert is selected,
                it is the index of an expert of another rank.
            async_finish: run on the Buffer's own stream and return an event to wait for.
            return_recv_hook: only send now, and return a hook that receives. Not with async_finish.
            topk_weights: float32 [T, K]: travels along, so that combine need not send it. On all
                ranks, or on none.
            compact: return each received token once instead of once per expert.
            report_num_tokens: wait_low_latency_num_tokens will be called. Not while a CUDA graph is
                captured.

        Returns:
            LowLatencyDispatchResult, a named tuple:
            recv_x: [L, R * M, H]: the rows of an expert, sorted by (source rank, source token). The
                first recv_count rows of an expert count. With use_fp8 (recv_x, scales), scales [L,
                R * M, S] stored by column. Compact: [R * M, H], rows sorted by (source rank, source
                token), of which the first handle.num_recv_tokens count. handle.recv_topk_idx has
                their local experts, -1 where none is selected and in the other rows;
                handle.recv_topk_weights the weights, 0 there. With use_nvfp4 rows are uint8 [...,
                H / 2], and scales float8_e4m3fn [L, ceil(R * M / 128), H / 64, 32, 4, 4] (compact
                without L), in the tiles of 128 rows and 4 scales that cuBLAS and CUTLASS read for
                block-scaled GEMMs: those of row 128 a + 32 b + c, columns 64 d + 16 e on, at [a, d,
                c, b, e].
            recv_count: int32 [L], rows of each expert.
            handle: for combine; see LowLatencyHandle.
            event: EventOverlap; empty without async_finish.
            hook: runs the receive phase; None without return_recv_hook.

        Raises:
            ArgumentError, BufferTooSmall: nothing was launched.
            ExpertIndexError: on this rank; the token's other selections were sent. On CUDA devices
                check() raises it: this call has returned before the kernel finds it.
            ConfigMismatch, PeerTimeout: on the ranks that notice; reset() makes the Buffer usable
                again.
            MaskedOut: the other ranks go on without this one (enable_shrink).

        Examples:
            >>> sent = buffer.low_latency_dispatch(
            ...     x, topk_idx, M, E, use_fp8=False, return_recv_hook=True)
            >>> shared = x * 2  # anything that does not need sent.recv_x
            >>> sent.hook()
            >>> y = buffer.low_latency_combine(
            ...     sent.recv_x, topk_idx, topk_weights, sent.handle).combined_x
        """
        if getattr(x, "requires_grad", False):
            warn_of_lost_gradient("Buffer.low_latency_dispatch")
        elif getattr(topk_weights, "requires_grad", False):
            warn_of_lost_gradient("Buffer.low_latency_dispatch", of="topk_weights")
        made = self._dispatch_low_latency(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
            cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, use_fp8,
            round_scale, use_ue8m0, async_finish, return_recv_hook, topk_weights, compact,
            report_num_tokens, use_nvfp4, x_global_scale, global_topk_idx,
        )  # fmt: skip
        return named(LowLatencyDispatchResult, made)

    def wait_low_latency_num_tokens(self) -> int:
        """Return the most tokens that any rank had in the last dispatch with ``report_num_tokens``.

        The last one whose receive phase has been launched: by the call, or its hook. Every rank
        gets the same number. The host waits until the receive phase has it, not until the dispatch
        has ended.

        Raises:
            ArgumentError: there was no such dispatch, or its hook has not run.
            PeerTimeout: the dispatch did not get there; or what else it ended with.

        Examples:
            >>> recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            ...     x, topk_idx, M, E, use_fp8=False, report_num_tokens=True)
            >>> most = buffer.wait_low_latency_num_tokens()
        """
        return self._low_latency.wait_num_tokens()

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        one_rounding: bool = False,
    ) -> LowLatencyCombineResult:
        """Return the weighted sum of the experts' rows of each token, at its source. Collective.

        **Rounding.** The rank of the experts adds weight * row over a token's selections there: in
        float32, k ascending, each product rounded to float32, the sum rounded to bfloat16. The
        token's rank adds those in float32, ranks ascending, and rounds to bfloat16. Compact rows
        have been reduced by their rank already, so only the second step remains.

        Args:
            x: bfloat16, the shape of dispatch's recv_x, contiguous.
            topk_idx: as given to dispatch.
            topk_weights: float32 [T, K]. Not used if dispatch got them, nor with compact rows.
            handle: of the dispatch whose rows these are.
            use_logfmt: what a rank of experts returns for a token is rounded to LogFMT-10, a sign
                and nine bits of a logarithm, instead of to bfloat16 (of compact rows: what it hands
                over): after DeepSeek-AI, "Insights into DeepSeek-V3", 2025, in a layout of this
                library (csrc/device/move/logfmt.cuh). 10 bits per element and 4 bytes per 16 of
                them, three quarters of the bytes. An element is wrong by a factor of at most 2 **
                ((r + 1/64) / 1020), where r is the binary logarithm of the ratio of the largest to
                the least of its 16, at most 32: 2.2 % then, 0.3 % at r = 4. Below 2**-32 of the
                largest it becomes 0. One element that is not finite makes all 16 NaN. Needs H a
                multiple of 16. Equal on all ranks. Not with zero_copy or one_rounding.
            zero_copy: the rows are in get_next_low_latency_combine_buffer(handle); of x only the
                shape counts.
            async_finish, return_recv_hook: as of low_latency_dispatch.
            out: bfloat16 [T, H]: written instead of a new tensor.
            combine_wait_recv_cost_stats: int64 [R], as dispatch's.
            one_rounding: send every row as it is. The token's rank adds weight * row in float32, k
                ascending, each product rounded to float32, and rounds to bfloat16. Moves one row
                per (token, expert) instead of per (token, rank). Needs room for M * K rows, with
                enable_shrink R * M * K, in a quarter of num_rdma_bytes: without masks more than the
                size hint where K > R, with them always. Equal on all ranks.

        Returns:
            LowLatencyCombineResult, a named tuple:
            combined_x: bfloat16 [T, H].
            event: EventOverlap; empty without async_finish.
            hook: as of low_latency_dispatch. The send phase waits for its peers' send phases,
                unless the weights came with dispatch.

        Raises:
            ArgumentError, BufferTooSmall, HandleMismatch: nothing was launched. Also if the hook of
                the handle's dispatch has not run.
            ConfigMismatch, PeerTimeout, MaskedOut: as of low_latency_dispatch.

        Examples:
            >>> sent = buffer.low_latency_dispatch(
            ...     x, topk_idx, M, E, use_fp8=False, topk_weights=topk_weights)
            >>> combined = buffer.low_latency_combine(
            ...     sent.recv_x, topk_idx, None, sent.handle, return_recv_hook=True)
            >>> combined.hook()
        """
        if getattr(x, "requires_grad", False):
            warn_of_lost_gradient("Buffer.low_latency_combine")
        elif getattr(topk_weights, "requires_grad", False):
            warn_of_lost_gradient("Buffer.low_latency_combine", of="topk_weights")
        made = self._combine_low_latency(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish,
            return_recv_hook, out, combine_wait_recv_cost_stats, one_rounding,
        )  # fmt: skip
        return named(LowLatencyCombineResult, made)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return where to write the rows for combine(zero_copy=True): bfloat16, shaped like recv_x.

        Every handle of this shape gets the same memory. It is allocated on first use (do this
        before a CUDA graph is captured). After the send phase of combine it may be written again.

        Raises:
            ArgumentError, HandleMismatch: not a low-latency handle; not of this rank of this group.

        Examples:
            >>> recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            ...     x, topk_idx, M, E, use_fp8=False)
            >>> rows = buffer.get_next_low_latency_combine_buffer(handle)
            >>> _ = rows.copy_(recv_x)  # as a rule the experts write here
            >>> combined_x, _, _ = buffer.low_latency_combine(
            ...     rows, topk_idx, topk_weights, handle, zero_copy=True)
        """
        self._context.require_open()
        buffer: Tensor | None = self._low_latency.combine_buffer(handle)
        if buffer is None:
            with torch.inference_mode(False):  # or nobody could write to it outside of that
                buffer = torch.empty(
                    handle.rows_shape, dtype=torch.bfloat16, device=self._context.device
                )
            self._low_latency.keep_combine_buffer(handle, buffer)
            logger.info("%s adds %d bytes for combine(zero_copy=True)", repr(self), buffer.nbytes)
        return buffer

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out from the next low-latency call on, or take it back.

        This concerns this rank only: tell the others likewise. A call whose hook has not run leaves
        the rank out too, with what has already come from it. A rank that has missed a call cannot
        come back this way, but with low_latency_clean_mask_buffer. Ordered on the current stream.

        Args:
            rank_to_mask: a rank of the group, not this one.
            mask: True: leave it out.

        Raises:
            ArgumentError: no such rank, or a Buffer without enable_shrink; a rank is to be taken
                back while a hook has not run.
            UnsupportedError: a rank that is absent since ``reset(without=...)`` is to be taken
                back.

        Examples:
            >>> if buffer.enable_shrink:
            ...     buffer.low_latency_update_mask_buffer(rank_to_mask=(rank + 1) % R, mask=False)
        """
        self._low_latency_region.update_mask(rank_to_mask, mask)
        logger.info("%s %s rank %d", repr(self), "masks" if mask else "takes back", rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write which ranks low-latency calls leave out.

        These are the ranks that were silent for the Buffer's timeout_s during a call of any rank,
        and those of low_latency_update_mask_buffer.

        A call during which a rank falls silent ends after at most a few such times. Dispatch leaves
        out its tokens. If it fell silent in the middle, recv_count may count rows of it that have
        no content, and combine returns nothing for them. Combine leaves out what its experts did
        not send. Later calls do not wait for it.

        Between nodes rows go straight from rank to rank with enable_shrink, so no row of a live
        rank is lost with another rank. A call whose mask stays zero has lost nothing.

        Args:
            mask_status: int32 [R], out: 1 for masked ranks. Ordered on the current stream.

        Raises:
            ArgumentError: another shape or dtype, or a Buffer without enable_shrink.

        Examples:
            >>> mask = torch.zeros(R, dtype=torch.int32, device=buffer.device)
            >>> if buffer.enable_shrink:
            ...     buffer.low_latency_query_mask_buffer(mask)
        """
        self._low_latency_region.query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks back. Collective over all of them, also those that were masked.

        Calls whose hooks have not run are forgotten. Waits for this rank's kernels.

        Raises:
            ArgumentError: a Buffer without enable_shrink.
            UnsupportedError: ranks are absent since ``reset(without=...)``, which only reset() of
                all ranks takes back.
            PeerLost: a rank does not come. The Buffer then needs another reset.

        Examples:
            >>> if buffer.enable_shrink:
            ...     buffer.low_latency_clean_mask_buffer()
        """
        self._low_latency_region.clean_mask()
        logger.info("%s takes back all ranks", repr(self))
