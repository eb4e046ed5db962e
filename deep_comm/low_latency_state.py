"""What a Buffer keeps for low-latency mode between calls: its region, pending hooks, buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm import _core, checks, env
from deep_comm.backends import Launch
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, BufferTooSmall, UnsupportedError
from deep_comm.events import EventOverlap
from deep_comm.low_latency_handle import LowLatencyHandle
from deep_comm.ops import quick
from deep_comm.topology import num_local_experts

MAX_BLOCKS = 160  # of a low-latency kernel
_MAX_TOPK = 64
_COLUMN_GROUP = 512  # columns that stay in one block
_HOST_BLOCKS = 3
_BLOCK_MULTIPLE = 8
_NUM_HALVES = 2
# In what calls keep for their hooks, here and in quick_low_latency.hpp, a tensor that no other call
# has: the metadata of a dispatch, the ticket of a combine.
_IDENTITY = _METADATA = 1

SCALE_BLOCK = 128
_SCALES_PER_PACK = 4
FP4_SCALE_WORD = 64  # columns of four scales
_FP4_TILE_ROWS = 128

Run = Callable[[bool, bool, int], None]
"""(send, receive, stream): launches these phases of an operation, in two launches by its ticket."""

ShapeOptions = tuple[int, int, int, int, bool, bool, bool, bool, bool, bool]
"""(max_tokens, hidden, num_topk, num_experts, use_fp8, round_scale, use_ue8m0, compact, weights
travel with dispatch, use_nvfp4).
"""


def region_bytes(
    num_ranks: int,
    num_max_tokens: int,
    hidden: int,
    is_internode: bool = False,
    can_shrink: bool = False,
) -> int:
    """Bytes of a region for any top-k, format, number of experts and GPU."""
    return _core.Engine.low_latency_region_bytes(
        num_ranks=num_ranks,
        num_max_tokens=num_max_tokens,
        hidden=hidden,
        num_topk=_MAX_TOPK,
        num_experts=1,
        num_blocks=MAX_BLOCKS,
        format="bfloat16",
        is_internode=is_internode,
        can_shrink=can_shrink,
    )


class LowLatencyShape:
    """Sizes and options of calls, and what follows from them: worked out once for all calls with
    them, since a call has a few microseconds of the host's time.

    Attributes:
        native: the engine's plan.
        recv_shape, recv_dtype, scales_shape, scales_dtype: of dispatch's outputs; no scales: None.
        rows_shape: of what combine takes.
        offsets: bytes from the start of a metadata block to its parts.
    """

    __slots__ = (
        "combine",
        "dispatch",
        "hidden",
        "is_compact",
        "is_nvfp4",
        "max_tokens",
        "members",
        "metadata_shape",
        "native",
        "num_experts",
        "num_local",
        "num_ranks",
        "num_rows",
        "num_topk",
        "offsets",
        "options",
        "rank",
        "recv_dtype",
        "recv_shape",
        "rows_shape",
        "scales_dtype",
        "scales_shape",
        "scales_strides",
        "ticket",
        "weights_travel",
    )

    def __init__(self, ctx: Context, options: ShapeOptions, num_blocks: int) -> None:
        (
            self.max_tokens,
            self.hidden,
            self.num_topk,
            self.num_experts,
            use_fp8,
            round_scale,
            use_ue8m0,
            self.is_compact,
            self.weights_travel,
            self.is_nvfp4,
        ) = self.options = options
        self.rank, self.num_ranks, self.members = ctx.rank, ctx.num_ranks, ctx.members
        self.num_local = num_local_experts(self.rank, self.num_experts, self.num_ranks)
        self.num_rows = self.num_ranks * self.max_tokens
        groups = () if self.is_compact else (self.num_local,)
        self.recv_shape = self.rows_shape = (*groups, self.num_rows, self.hidden)
        self.recv_dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        self.scales_shape: tuple[int, ...] | None = None
        self.scales_dtype = torch.int32 if use_ue8m0 else torch.float32
        if use_fp8:
            num_scales = self.hidden // SCALE_BLOCK
            # By column, as grouped kernels want them.
            if use_ue8m0:
                num_scales = -(-num_scales // _SCALES_PER_PACK)
            self.scales_shape = (*groups, self.num_rows, num_scales)
            strides = (num_scales * self.num_rows, 1, self.num_rows)
            self.scales_strides = strides if groups else strides[1:]
        if self.is_nvfp4:
            self.recv_shape = (*groups, self.num_rows, self.hidden // 2)
            self.recv_dtype, self.scales_dtype = torch.uint8, torch.float8_e4m3fn
            num_tiles = -(-self.num_rows // _FP4_TILE_ROWS)
            self.scales_shape = (*groups, num_tiles, self.hidden // FP4_SCALE_WORD, 32, 4, 4)
        self.native = ctx.engine.plan_low_latency(
            num_max_tokens=self.max_tokens,
            hidden=self.hidden,
            num_topk=self.num_topk,
            num_experts=self.num_experts,
            num_blocks=num_blocks,
            format="nvfp4" if self.is_nvfp4 else "fp8" if use_fp8 else "bfloat16",
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            is_compact=self.is_compact,
            has_weights=self.weights_travel,
        )
        self.dispatch, self.combine = self.native.dispatch, self.native.combine
        self.offsets: dict[str, int] = self.native.metadata
        self.ticket: int = self.offsets["ticket"]
        self.metadata_shape = (self.native.num_metadata_bytes // 4,)

    def tensor_forms(self) -> list[quick.TensorForm]:
        """Shape, strides and dtype of recv_x, metadata, recv_count and, if there are, scales."""
        strides = quick.contiguous_strides
        forms = [
            (self.recv_shape, strides(self.recv_shape), self.recv_dtype),
            (self.metadata_shape, (1,), torch.int32),
            ((self.num_local,), (1,), torch.int32),
        ]
        if self.scales_shape is not None:
            by_row = strides(self.scales_shape)
            forms.append(
                (
                    self.scales_shape,
                    by_row if self.is_nvfp4 else self.scales_strides,
                    self.scales_dtype,
                )
            )
        return forms


def _refuse_hook(ctx: Context) -> None:
    ctx.require_open()
    raise ArgumentError("hook", None, "may be called once, and not after reset()")


def most_blocks(num_sms: int, wanted: int | None) -> int:
    """Blocks that a call may have; ``wanted``: what the environment asks for, taken as it is.

    Numbers of tokens are mostly powers of two: of 132 blocks four would have no tokens, and cost
    pairs of 16 tokens and more 0.3 to 0.9 us by being there (4 x H200).
    """
    if wanted is not None:
        return min(num_sms, wanted)
    return max(num_sms - num_sms % _BLOCK_MULTIPLE, min(num_sms, _BLOCK_MULTIPLE))


class LowLatencyState:
    """Of one Buffer. Holds no reference to the Buffer."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._pending: dict[str, list[Any]] = {"dispatch": [], "combine": []}
        self.pending_dispatches, self.pending_combines = self._pending.values()
        self._overtaken: list[weakref.ref[Tensor]] = []
        # What hooks of dispatches keep that have not run, and metadata of those that never will.
        self.unreceived: tuple[list[Any], list[weakref.ref[Tensor]]] = (
            self._pending["dispatch"],
            [],
        )
        self.is_region_lent = False  # as a tensor: what is written there is not known any more
        self.combine_buffers: dict[tuple[int, ...], Tensor] = {}
        self._num_blocks: dict[tuple[int, int, int, int, bool, bool], int] = {}
        self.shapes: dict[ShapeOptions, LowLatencyShape] = {}
        # Whole calls in one native step, of the shapes that are known; None: not this one.
        self.quick_dispatch: Callable[..., Any] = quick.never
        self.quick_combine: Callable[..., Any] = quick.never
        self.quick_calls: Any = None
        torch_parts = quick.torch_of(ctx.device)
        if ctx.low_latency_bytes > 0 and torch_parts is not None and not env.POISON.get():
            self.quick_calls = ctx.engine.quick_low_latency(
                *torch_parts,
                empty_address=ctx.heap.base,
                pending_dispatches=self._pending["dispatch"],
                pending_combines=self._pending["combine"],
                refuse_hook=functools.partial(_refuse_hook, ctx),
                end=ctx.end if ctx.backend.is_synchronous else None,
                bfloat16=torch.bfloat16,
                int32=torch.int32,
                handle_type=LowLatencyHandle,
                event_type=EventOverlap,
                outputs_event=ctx.backend.end_with_outputs,
                streams=ctx.backend.quick_streams(),
            )
            self.quick_dispatch = self.quick_calls.dispatch
            self.quick_combine = self.quick_calls.combine

    def make_shape(self, options: ShapeOptions) -> LowLatencyShape:
        """Checks the sizes of calls; afterwards ``shapes`` has it."""
        max_tokens, hidden, num_topk, num_experts, use_fp8, *_ = options
        num_blocks = self.num_blocks(max_tokens, hidden, num_topk, num_experts, use_fp8)
        shape = self.shapes[options] = LowLatencyShape(self._ctx, options, num_blocks)
        if self.quick_calls is not None:
            self.quick_calls.add(
                shape.native, shape, use_fp8, shape.is_nvfp4, shape.num_local, shape.tensor_forms()
            )
        return shape

    def num_blocks(
        self,
        num_max_tokens: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        use_fp8: bool = False,
        one_rounding: bool = False,
    ) -> int:
        """Blocks of a call, equal on all ranks, if the region has room for it; else BufferTooSmall.

        Looked up after the first call of a shape: these calls are about microseconds.
        """
        shape = (num_max_tokens, hidden, num_topk, num_experts, use_fp8, one_rounding)
        found = self._num_blocks.get(shape)
        if found is None:
            found = self._num_blocks[shape] = self._checked_num_blocks(*shape)
        return found

    def _checked_num_blocks(
        self,
        num_max_tokens: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        use_fp8: bool,
        one_rounding: bool,
    ) -> int:
        ctx = self._ctx
        if ctx.low_latency_bytes == 0:
            raise ArgumentError(
                "low_latency_mode", None, "must be True, with num_rdma_bytes, for low-latency calls"
            )
        most = ctx.engine.low_latency_max_experts(num_topk=num_topk)
        if num_experts > most:
            raise ArgumentError(
                "num_experts", num_experts,
                f"must be at most {most} in low-latency calls with top-{num_topk} and "
                f"{ctx.num_ranks} ranks: a block counts them in its shared memory",
            )  # fmt: skip
        available = most_blocks(ctx.backend.max_sms or _HOST_BLOCKS, env.NUM_SMS.get())
        # No more than there are pieces of work, and one: the last block counts, best without rows.
        num_pieces = num_max_tokens * -(-hidden // _COLUMN_GROUP)
        num_blocks = min(available, MAX_BLOCKS, num_pieces + 1)
        needed = ctx.engine.low_latency_region_bytes(
            num_ranks=ctx.num_ranks,
            num_max_tokens=num_max_tokens,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            num_blocks=num_blocks,
            format="fp8" if use_fp8 else "bfloat16",
            one_rounding=one_rounding,
            is_internode=ctx.topology.num_nodes > 1,
            can_shrink=ctx.enable_shrink,
        )
        if needed > ctx.low_latency_bytes:
            raise BufferTooSmall(
                ctx.low_latency_bytes,
                needed,
                f"{num_max_tokens} tokens a rank of hidden size {hidden}",
                argument="num_rdma_bytes",
            )
        return num_blocks

    def require_half(self, kind: str) -> None:
        """An operation may be sent while one of its kind waits for its hook, not the next: it has
        the same half."""
        pending = self._pending[kind]
        if len(pending) >= _NUM_HALVES or any(map(self._is_overtaken, pending)):
            raise ArgumentError(
                "return_recv_hook",
                None,
                f"allows two low_latency_{kind} calls from one on whose hooks have not run: call "
                "the hook of an earlier one first",
            )

    def overtake(self, waiting: Sequence[Any]) -> None:
        """``waiting`` were pending when another operation of their kind was sent."""
        self._overtaken = [other for other in self._overtaken if other() is not None]
        self._overtaken += [weakref.ref(kept[_IDENTITY]) for kept in waiting]

    def _is_overtaken(self, kept: Any) -> bool:
        return any(other() is kept[_IDENTITY] for other in self._overtaken)

    def require_received(self, metadata: Tensor) -> None:
        """Combine reads the rows' places from ``metadata``: until dispatch's receive phase has run
        they are whatever the memory held before."""
        pending, forgotten = self.unreceived
        if any(kept[_METADATA] is metadata for kept in pending):
            remedy = "whose hook has run: call it first"
        elif any(other() is metadata for other in forgotten):
            remedy = "whose hook ran: reset() has forgotten this one's"
        else:
            return
        raise ArgumentError("handle", "rows not received yet", f"must be of a dispatch {remedy}")

    def launch(self, async_finish: bool) -> Launch:
        if async_finish:
            return self._ctx.launch(None, True, False)
        return self._ctx.backend.launch_unordered()

    def hook(
        self, kind: str, launch: Launch, run: Run, tensors: Sequence[Tensor | None]
    ) -> Callable[[], None]:
        """Launches the send phase; the hook runs the receive phase, and keeps what both work on.

        Failures of the send phase are raised by the hook: peers count on its receive phase.
        """
        ctx, pending, stream = self._ctx, self._pending[kind], launch.stream
        entry = list(tensors)
        run(True, False, stream)
        pending.append(entry)

        def hook() -> None:
            ctx.require_open()
            if not any(other is entry for other in pending):
                _refuse_hook(ctx)
            pending[:] = [other for other in pending if other is not entry]
            with ctx.backend.device_scope():
                run(False, True, stream)
            ctx.end()

        return hook

    # ---- the region in the caller's hands ------------------------------------------------------

    def clean(self) -> None:
        """Collective, and only what is needed: a region that nobody has seen is zero."""
        ctx = self._ctx
        if not self.is_region_lent or ctx.absent or (ctx.enable_shrink and self._masked().any()):
            return
        if ctx.backend.is_capturing():
            raise UnsupportedError("clean_low_latency_buffer waits for all ranks: not in a graph")
        if any(self._pending.values()):
            raise ArgumentError("hook", None, "must be called before clean_low_latency_buffer")
        with ctx.backend.device_scope():
            ctx.synchronize()
            ctx.engine.quiet_rail()
            ctx.rendezvous.barrier()  # nobody's rows are on their way here
            ctx.heap.view(
                ctx.low_latency_end - ctx.low_latency_bytes, ctx.low_latency_bytes
            ).zero_()
            ctx.synchronize()
            ctx.rendezvous.barrier()  # nobody sends before all regions are zero

    def combine_buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Where callers may write the rows of the next combine; made when first asked for."""
        buffer = self.combine_buffers.get(shape)
        if buffer is None:
            with torch.inference_mode(False):  # or nobody could write to it outside of that
                buffer = torch.empty(shape, dtype=torch.bfloat16, device=self._ctx.device)
            self.combine_buffers[shape] = buffer
        return buffer

    def filled_combine_buffer(self, shape: tuple[int, ...]) -> Tensor:
        if shape not in self.combine_buffers:
            raise ArgumentError(
                "zero_copy", True, "needs rows in get_next_low_latency_combine_buffer(handle)"
            )
        return self.combine_buffers[shape]

    def reset(self) -> None:
        """Hooks from before a reset have nothing left to receive."""
        pending, forgotten = self.unreceived
        forgotten[:] = [other for other in forgotten if other() is not None]
        forgotten += [weakref.ref(kept[_METADATA]) for kept in pending]
        for of_kind in self._pending.values():
            of_kind.clear()
        if self.quick_calls is not None:  # also of layers, which hold calls of their own
            self.quick_calls.is_served = not self._ctx.absent or self._ctx.enable_shrink

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
            masked = ctx.heap.view(ctx.engine.rail_masked_offset, 8 * ctx.num_ranks)
            masked = masked.view(torch.int64)
            return masked, masked.new_zeros(1, ctx.num_ranks)
        num_ranks = ctx.engine.max_ranks
        own = ctx.heap.view(ctx.engine.masked_offset, 4 * num_ranks).view(torch.int32)
        votes = ctx.heap.view(ctx.engine.votes_offset, 4 * num_ranks * num_ranks)
        return own, votes.view(torch.int32).view(num_ranks, num_ranks)

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
        own, votes = self._masks()
        own[rank] = int(bool(is_masked))
        if not is_masked:
            votes[:, rank] = 0

    def query_mask(self, mask_status: Any) -> None:
        self._require_shrink()
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
        self.reset()
        record = self._ctx.engine.poll_error()
        if record is not None and record.kernel.startswith("low_latency"):
            self._ctx.engine.clear_error()
