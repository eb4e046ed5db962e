"""What a Buffer keeps for low-latency mode between calls: its region, pending hooks, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from deep_comm import _core, env
from deep_comm.backends import Launch
from deep_comm.backends.base import poison
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, BufferTooSmall
from deep_comm.events import EventHandle, EventOverlap

MAX_BLOCKS = 160  # of a low-latency kernel
_MAX_TOPK = 64
_COLUMN_GROUP = 512  # columns that stay in one block
_HOST_BLOCKS = 3
_NUM_HALVES = 2

Run = Callable[[bool, bool, Tensor | None, int], None]
"""(send, receive, ticket, stream): launches these phases of an operation."""


def region_bytes(num_ranks: int, num_max_tokens: int, hidden: int) -> int:
    """Bytes of a region for any top-k, format, number of experts and GPU."""
    return _core.Engine.low_latency_region_bytes(
        num_ranks=num_ranks,
        num_max_tokens=num_max_tokens,
        hidden=hidden,
        num_topk=_MAX_TOPK,
        num_experts=1,
        num_blocks=MAX_BLOCKS,
        format="bfloat16",
    )


@dataclass(frozen=True)
class Phases:
    """How an operation runs: at once on the current stream, aside, or in two phases."""

    async_finish: bool
    return_recv_hook: bool

    def __post_init__(self) -> None:
        if self.async_finish and self.return_recv_hook:
            raise ArgumentError("return_recv_hook", True, "excludes async_finish")


class _CurrentStreamLaunch:
    """An operation on the caller's own CUDA stream: no events, nothing to wait for."""

    def __init__(self, device: torch.device, poison_outputs: bool) -> None:
        self._device = device
        self._poison_outputs = poison_outputs
        self._scope = contextlib.ExitStack()
        self.stream = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return self.adopt(tensor)

    def adopt(self, tensor: Tensor) -> Tensor:
        if self._poison_outputs:
            poison(tensor)
        return tensor

    def wait(self, events: Iterable[EventHandle]) -> None:
        for event in events:
            event.current_stream_wait()

    def finish(self, inputs: Iterable[Tensor | None]) -> EventOverlap:
        return EventOverlap(None)

    def __enter__(self) -> _CurrentStreamLaunch:
        self._scope.enter_context(torch.cuda.device(self._device))
        self.stream = torch.cuda.current_stream(self._device).cuda_stream
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scope.close()


class LowLatencyState:
    """Of one Buffer. Holds no reference to the Buffer."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._pending: dict[str, list[object]] = {"dispatch": [], "combine": []}
        self._combine_buffers: dict[tuple[int, ...], Tensor] = {}
        self._num_blocks: dict[tuple[int, int, int, int, bool, bool], int] = {}
        self._poison_outputs = env.POISON.get()

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
        available = ctx.backend.max_sms or _HOST_BLOCKS
        wanted = env.NUM_SMS.get()
        if wanted is not None:
            available = min(available, wanted)
        # No more than there are pieces of work.
        num_blocks = min(available, MAX_BLOCKS, num_max_tokens * -(-hidden // _COLUMN_GROUP))
        needed = ctx.engine.low_latency_region_bytes(
            num_ranks=ctx.num_ranks,
            num_max_tokens=num_max_tokens,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            num_blocks=num_blocks,
            format="fp8" if use_fp8 else "bfloat16",
            one_rounding=one_rounding,
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
        """An operation may be sent while one of its kind waits for its hook, not while two do."""
        if len(self._pending[kind]) >= _NUM_HALVES:
            raise ArgumentError(
                "return_recv_hook",
                None,
                f"allows two low_latency_{kind} calls whose hooks have not run: call the hook of an "
                "earlier one first",
            )

    def launch(self, async_finish: bool) -> Launch:
        if async_finish or self._ctx.device.type != "cuda":
            return self._ctx.backend.launch(None, async_finish, False)
        return _CurrentStreamLaunch(self._ctx.device, self._poison_outputs)

    def run(
        self,
        kind: str,
        phases: Phases,
        launch: Launch,
        run: Run,
        inputs: Iterable[Tensor | None],
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        """Launches what is due now; a hook does the rest."""
        if not phases.return_recv_hook:
            run(True, True, None, launch.stream)
            event = launch.finish(inputs)
            self._ctx.end()
            return event, None
        ticket = launch.empty((1,), torch.int32)
        run(True, False, ticket, launch.stream)
        # Failures of the send phase are raised by the hook: peers count on its receive phase.
        event = launch.finish(inputs)
        pending = self._pending[kind]
        pending.append(ticket)
        stream = launch.stream
        ctx = self._ctx

        def hook() -> None:
            ctx.require_open()
            if not any(entry is ticket for entry in pending):
                raise ArgumentError("hook", None, "may be called once, and not after reset()")
            pending[:] = [entry for entry in pending if entry is not ticket]
            with ctx.backend.device_scope():
                run(False, True, ticket, stream)
            ctx.end()

        return event, hook

    def combine_buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Where callers may write the rows of the next combine; made when first asked for."""
        buffer = self._combine_buffers.get(shape)
        if buffer is None:
            buffer = torch.empty(shape, dtype=torch.bfloat16, device=self._ctx.device)
            self._combine_buffers[shape] = buffer
        return buffer

    def filled_combine_buffer(self, shape: tuple[int, ...]) -> Tensor:
        if shape not in self._combine_buffers:
            raise ArgumentError(
                "zero_copy", True, "needs rows in get_next_low_latency_combine_buffer(handle)"
            )
        return self._combine_buffers[shape]

    def reset(self) -> None:
        """Hooks from before a reset have nothing left to receive."""
        for pending in self._pending.values():
            pending.clear()
