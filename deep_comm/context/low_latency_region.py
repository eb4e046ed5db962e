"""The low-latency region of a Buffer: its size, its cleaning, and the masks of ranks beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_comm import _core
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.handle import LowLatencyHandle
from deep_comm.settings import checks, env

_LEAST_HIDDEN = 8
_MAX_BLOCKS = 160  # of a low-latency kernel


def region_bytes(
    num_ranks: int,
    num_max_tokens: int,
    hidden: int,
    is_internode: bool = False,
    can_shrink: bool = False,
) -> int:
    """Return the bytes of a region for any top-k, format, number of experts and GPU."""
    return _core.Engine.low_latency_region_bytes(
        num_ranks=num_ranks,
        num_max_tokens=num_max_tokens,
        hidden=hidden,
        num_topk=_core.max_topk,
        num_experts=1,
        num_blocks=_MAX_BLOCKS,
        format="bfloat16",
        is_internode=is_internode,
        can_shrink=can_shrink,
    )


def native_calls(ctx: Context) -> _core.LowLatencyCalls:
    """Return the low-latency calls of a Buffer."""
    return _core.LowLatencyCalls(
        ctx.native_calls,
        framework=ctx.backend.framework,
        can_shrink=ctx.enable_shrink,
        num_wanted_blocks=env.NUM_SMS.get(),
        handle_type=LowLatencyHandle,
        tensors_event=ctx.backend.tensors_event,
    )


class LowLatencyRegion:
    """Of one Buffer. Holds no reference to the Buffer.

    Attributes:
        is_lent: as a tensor: what is written there is not known any more.
    """

    def __init__(self, ctx: Context, calls: _core.LowLatencyCalls) -> None:
        self._ctx, self._calls = ctx, calls
        ctx.forget_hooks = calls.forget_pending
        self.is_lent = False

    def clean(self) -> None:
        """Zero the region, if anybody has seen it. Collective then, and with masks always."""
        ctx = self._ctx
        if not self.is_lent and not ctx.enable_shrink:
            return
        if self._calls.has_pending:
            raise ArgumentError("hook", None, "must be called before clean_low_latency_buffer")
        with ctx.backend.device_scope():
            self._barrier()  # nobody's rows are on their way here
            if not self.is_lent:
                return
            ctx.heap.view(ctx.low_latency_begin, [ctx.low_latency_bytes]).zero_()
            self._barrier()  # nobody sends before all regions are zero

    def _barrier(self) -> None:
        """A dispatch without tokens: it ends once every rank has begun it, or is masked."""
        x = torch.empty(0, _LEAST_HIDDEN, dtype=torch.bfloat16, device=self._ctx.device)
        topk_idx = torch.empty(0, 1, dtype=torch.int64, device=self._ctx.device)
        is_compact, nothing = True, (None, None)
        self._calls.dispatch(
            x, topk_idx, 1, 1, *nothing, False, False, False, False, False, None, is_compact,
            False, False, None, False,
        )  # fmt: skip

    # ---- masks ---------------------------------------------------------------------------------

    def _require_shrink(self) -> None:
        self._ctx.require_open()
        if not self._ctx.enable_shrink:
            raise ArgumentError("enable_shrink", False, "must be True for rank masks")

    def _masks(self) -> tuple[Tensor, Tensor]:
        """Ranks that this one does without [8 or R], and what the others say [8, 8]; of a group
        of several nodes the first is both."""
        ctx = self._ctx
        if ctx.topology.num_nodes > 1:
            offset = ctx.engine.rail_masked_offset
            masked = ctx.heap.view(offset, [ctx.num_ranks], torch.int64)
            return masked, masked.new_zeros(1, ctx.num_ranks)
        num_ranks = ctx.engine.max_ranks
        own = ctx.heap.view(ctx.engine.masked_offset, [num_ranks], torch.int32)
        return own, ctx.heap.view(ctx.engine.votes_offset, [num_ranks, num_ranks], torch.int32)

    def update_mask(self, rank: Any, is_masked: bool) -> None:
        self._require_shrink()
        if (
            not isinstance(rank, int)
            or not 0 <= rank < self._ctx.num_ranks
            or rank == self._ctx.rank
        ):
            raise ArgumentError(
                "rank_to_mask", rank, f"must be another rank of the {self._ctx.num_ranks}"
            )
        self._ctx.native_calls.require_no_call()
        if not is_masked:
            if rank in self._ctx.absent:
                raise UnsupportedError(
                    f"rank {rank} is absent since reset(without=...); reset() of all ranks takes "
                    "it back"
                )
            if self._calls.has_pending:  # which may have left it out
                raise ArgumentError("hook", None, "must be called before a rank is taken back")
        own, votes = self._masks()
        own[rank] = int(bool(is_masked))
        if not is_masked:
            votes[:, rank] = 0

    def query_mask(self, mask_status: Any) -> None:
        self._require_shrink()
        self._ctx.native_calls.require_no_call()
        num_ranks = self._ctx.num_ranks
        status = checks.tensor(
            "mask_status", mask_status, self._ctx.device, shape=(num_ranks,), dtypes=(torch.int32,)
        )
        status.copy_(self._masked())

    def _masked(self) -> Tensor:
        """[R], 1 for ranks that calls do without."""
        own, votes = self._masks()
        masked = own + votes.sum(dim=0, dtype=own.dtype)
        masked[self._ctx.rank] = 0
        return masked[: self._ctx.num_ranks].clamp_(max=1)

    def clean_mask(self) -> None:
        self._require_shrink()
        self._ctx.reset_low_latency()
        record = self._ctx.engine.poll_error()
        if record is not None and record.kernel.startswith("low_latency"):
            self._ctx.engine.clear_error()
