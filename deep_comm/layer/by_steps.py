"""A layer whose steps are made of the Buffer's calls alone: what its own native calls are held
against, and what a profiler of Python's calls can see into."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from deep_comm.layer.decode import NEVER, never

if TYPE_CHECKING:
    from deep_comm.layer.expert_parallel import ExpertParallel


def by_steps(layer: ExpertParallel) -> ExpertParallel:
    """The same layer, over the same Buffer, without the native calls of its own."""
    slow = copy.copy(layer)
    steps: Any = copy.copy(layer._steps)
    transport: Any = copy.copy(steps.transport)
    slow._steps, steps.transport = steps, transport
    transport.quick = NEVER
    steps._begin = steps._end = never
    steps.forward_quick = steps.dispatch_quick = never
    return slow
