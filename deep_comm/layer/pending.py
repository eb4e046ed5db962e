"""What has been sent and not yet received."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from deep_comm.errors import BufferInUse

T = TypeVar("T")


class Pending(Generic[T]):
    """The rest of an operation; work that does not need its result goes in between::

        with layer.dispatch_async(x, topk_idx, topk_weights) as sent:
            shared = shared_experts(x)  # while rows travel
        batch = sent.result()

    Leaving the block receives: the current stream waits for what was sent (decode: the receive
    phase is launched on it). ``result()`` may be asked inside the block or without one as well.
    Operations still have to be received in the order that all ranks agree on.
    """

    __slots__ = ("_error", "_finish", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._error: BaseException | None = None
        self._result: T

    def result(self) -> T:
        """Receives, unless that has happened. The host waits here for what it must know, as the
        counts of a prefill batch. Raises what went wrong, in every call; after BufferInUse it may
        be called again."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except BufferInUse:
                self._finish = finish
                raise
            except BaseException as error:  # noqa: BLE001 - raised below, a signal's as well
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result

    def __enter__(self) -> Pending[T]:
        return self

    def __exit__(self, *_raised: object) -> None:
        # Also behind an exception: the peers count on this rank's receive phase.
        self.result()
