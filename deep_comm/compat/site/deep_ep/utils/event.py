"""Events, where V2's callers look for them."""

from deep_comm import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
