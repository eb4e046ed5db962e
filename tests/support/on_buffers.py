"""A body with a Buffer on every rank: the frame of most tests of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep_comm import Buffer, local


def on_buffers(
    body: Callable[[Buffer], Any],
    num_ranks: int,
    *sizes: int,
    return_errors: bool = False,
    **options: Any,
) -> list[Any]:
    """What ``body(buffer)`` returns on threads of the host target, by rank.

    ``sizes`` and ``options`` are the Buffer's.
    """

    def main(group: local.ThreadGroup) -> Any:
        with Buffer(group, *sizes, **{"device": "cpu", **options}) as buffer:
            return body(buffer)

    return local.run(main, num_ranks, timeout_s=250, return_errors=return_errors)
