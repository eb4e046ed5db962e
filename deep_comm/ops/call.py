"""How one call wants to run: its config, and its place among the streams."""

from __future__ import annotations

from dataclasses import dataclass

from deep_comm.backends import Launch
from deep_comm.config import Config
from deep_comm.context import Context
from deep_comm.errors import ArgumentError
from deep_comm.events import EventHandle, EventOverlap, unwrap


@dataclass(frozen=True)
class StreamOptions:
    """What to wait for, whether to return before the end, and whose memory outputs are."""

    previous_event: EventHandle | None
    async_finish: bool
    allocate_on_comm_stream: bool

    @staticmethod
    def checked(
        previous_event: EventOverlap | EventHandle | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> StreamOptions:
        """The three as callers give them; they may only be combined as the streams allow."""
        event = unwrap(previous_event)
        if allocate_on_comm_stream and (event is None or not async_finish):
            given = "given" if event is not None else None
            raise ArgumentError(
                "allocate_on_comm_stream",
                f"previous_event={given}, async_finish={async_finish}",
                "needs a previous_event and async_finish=True",
            )
        return StreamOptions(event, async_finish, allocate_on_comm_stream)

    def launch(self, ctx: Context) -> Launch:
        return ctx.backend.launch(
            self.previous_event, self.async_finish, self.allocate_on_comm_stream
        )


@dataclass(frozen=True)
class CallOptions:
    """Options of dispatch and combine."""

    config: Config | None  # the caller's, taken as it is
    default_config: Config  # otherwise this one, shrunk until it fits
    streams: StreamOptions
