"""Dual-batch overlap, off unless a test turns it on. Calls are written down."""

import threading
from collections.abc import Callable
from typing import Any

_state = threading.local()


def enable(ubatch_id: int) -> None:
    _state.ubatch_id = ubatch_id
    _state.calls = getattr(_state, "calls", [])


def disable() -> None:
    _state.__dict__.pop("ubatch_id", None)


def calls() -> list[str]:
    return _state.calls


def dbo_enabled() -> bool:
    return hasattr(_state, "ubatch_id")


def dbo_current_ubatch_id() -> int:
    return getattr(_state, "ubatch_id", 0)


def dbo_get_previous_event(func: Callable, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs) if dbo_enabled() else None


def _note(name: str) -> Callable[[], None]:
    def call() -> None:
        if dbo_enabled():
            _state.calls.append(name)

    return call


dbo_maybe_run_recv_hook = _note("maybe_run_recv_hook")
dbo_switch_to_comm = _note("switch_to_comm")
dbo_switch_to_compute = _note("switch_to_compute")
dbo_switch_to_compute_sync = _note("switch_to_compute_sync")
dbo_yield_and_switch_from_comm_to_compute = _note("yield_and_switch_from_comm_to_compute")
dbo_yield_and_switch_from_compute_to_comm = _note("yield_and_switch_from_compute_to_comm")
