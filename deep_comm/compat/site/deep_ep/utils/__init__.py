"""Events, where V1's callers look for them."""

from deep_comm import EventHandle, EventOverlap
from deep_ep.utils import envs, event

__all__ = ["EventHandle", "EventOverlap", "envs", "event"]
