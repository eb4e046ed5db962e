"""How one call wants to run: its config, and its place among the streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_comm.backends import Launch
from deep_comm.config import Config
from deep_comm.context import Context
from deep_comm.errors import ArgumentError
from deep_comm.events import EventHandle, EventOverlap, unwrap

if TYPE_CHECKING:
    from deep_comm.handle_base import HeldTensors


class StreamOptions:
    """What to wait for, whether to return before the end, and whose memory outputs are.

    Attributes: as given; ``is_quick``: calls in one native step can run so; ``asynchronous``: what
    they are told, the event and whether outputs are the communication stream's, or None.
    """

    __slots__ = (
        "previous_event", "async_finish", "allocate_on_comm_stream", "is_quick", "asynchronous"
    )  # fmt: skip

    def __init__(
        self, previous_event: EventHandle | None, async_finish: bool, allocate_on_comm_stream: bool
    ) -> None:
        self.previous_event = previous_event
        self.async_finish = async_finish
        self.allocate_on_comm_stream = allocate_on_comm_stream
        self.is_quick = async_finish or previous_event is None
        self.asynchronous: tuple[EventHandle | None, bool] | None = None
        if async_finish:
            on_comm = bool(allocate_on_comm_stream or previous_event is not None)
            self.asynchronous = previous_event, on_comm

    @staticmethod
    def checked(
        previous_event: EventOverlap | EventHandle | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> StreamOptions:
        """The three as callers give them; they may only be combined as the streams allow."""
        if previous_event is None and not async_finish and not allocate_on_comm_stream:
            return SYNCHRONOUS
        event = None if previous_event is None else unwrap(previous_event)
        if allocate_on_comm_stream and (event is None or not async_finish):
            given = "given" if event is not None else None
            raise ArgumentError(
                "allocate_on_comm_stream",
                f"previous_event={given}, async_finish={async_finish}",
                "needs a previous_event and async_finish=True",
            )
        if event is None and not async_finish:
            return SYNCHRONOUS
        return StreamOptions(event, async_finish, allocate_on_comm_stream)

    def quick_end(self, ctx: Context, known: HeldTensors | None = None) -> EventOverlap:
        """Behind a call in one native step, with the handle ``known``."""
        if self.asynchronous is None:
            return EventOverlap()
        return ctx.backend.end_asynchronous(known, self.asynchronous[1])

    def launch(self, ctx: Context) -> Launch:
        return ctx.backend.launch(
            self.previous_event, self.async_finish, self.allocate_on_comm_stream
        )


SYNCHRONOUS = StreamOptions(None, False, False)


class CallOptions:
    """Options of dispatch and combine between nodes."""

    __slots__ = ("config", "default_config", "names_sms", "streams")

    def __init__(
        self,
        config: Config | None,
        default_config: Config | None,
        names_sms: bool,
        streams: StreamOptions,
    ) -> None:
        self.config = config  # the caller's, taken as it is
        self.default_config = default_config  # otherwise this one, shrunk until it fits
        self.names_sms = names_sms  # whether somebody has said how many the call may have
        self.streams = streams
