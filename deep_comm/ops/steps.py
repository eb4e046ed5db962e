"""A dispatch with new routing as a caller has it: at once, or sent now and received later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import inference_mode, is_inference_mode_enabled

from deep_comm.backends import Launch
from deep_comm.context import Context
from deep_comm.errors import CallInterrupted
from deep_comm.ops.call import StreamOptions


class Steps(Protocol):
    """A dispatch with new routing, of one tier or two."""

    ctx: Context
    num_worst_tokens: int

    def send(self, launch: Launch) -> None: ...
    def receive(self) -> None: ...
    def receive_unmoved(self, launch: Launch, unmoved: Any) -> None:
        """``send`` and ``receive`` where a native step has done all but move the rows."""

    def end(self) -> tuple[Any, ...]: ...
    def remember(self) -> None:
        """The next call of this form may take one native step."""


def dispatch(call: Steps, streams: StreamOptions) -> Any:
    ctx = call.ctx
    with streams.launch(ctx) as launch:
        call.send(launch)
        if call.num_worst_tokens == 0:
            call.receive()
        result = call.end()
    ctx.end()
    if streams.is_quick:
        call.remember()
    return result


def dispatch_unmoved(call: Steps, unmoved: Any, streams: StreamOptions) -> Any:
    """The rest of a dispatch whose rows a native step could not move."""
    with streams.launch(call.ctx) as launch:
        call.receive_unmoved(launch, unmoved)
        result = call.end()
    call.ctx.end()
    return result


class PendingDispatch:
    """A dispatch that has been sent, and whose counts the host has not waited for yet. It will in
    ``result``, or in the Buffer's next operation of normal mode, which comes behind this one.
    """

    __slots__ = ("_ctx", "_error", "_finish", "_is_inference", "_result")

    def __init__(self, ctx: Context, finish: Callable[[], Any]) -> None:
        """``finish`` waits and ends the operation, and holds what its kernels use."""
        self._ctx = ctx
        self._is_inference = is_inference_mode_enabled()
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None
        # Also where the caller drops this: kernels use what it holds, and peers count on this rank.
        ctx.pending = self

    def settle(self) -> None:
        """Waits and ends the operation. What is wrong with it is for ``result`` to say."""
        if self._finish is None:
            return
        finish = self._finish
        self._finish = self._ctx.pending = None
        try:
            if is_inference_mode_enabled() and not self._is_inference:
                # Of another operation: gradients may want these tensors.
                with inference_mode(False):
                    self._result = finish()
            else:
                self._result = finish()
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        except BaseException:  # of a signal's handler, seen while the host waited
            self._error = CallInterrupted(self._ctx.rank)
            raise

    def forget(self, error: Exception) -> None:
        """The Buffer does without; its kernels have ended."""
        self._finish = self._ctx.pending = None
        self._error = error

    def result(self) -> Any:
        """Raises what went wrong, in every call."""
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def begin_dispatch(call: Steps, streams: StreamOptions) -> PendingDispatch:
    """Without num_worst_tokens, asynchronous, up to where the host would wait."""
    ctx = call.ctx
    launch = streams.launch(ctx)
    with launch:
        call.send(launch)
        launch.pause()

    def finish() -> Any:
        launch.resume()
        with launch:
            call.receive()
            result = call.end()
        ctx.end()
        call.remember()
        return result

    return PendingDispatch(ctx, finish)
