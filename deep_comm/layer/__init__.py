"""ExpertParallel and what it hands to experts."""

from __future__ import annotations

from deep_comm.context.shape import MemoryEstimate, MoEShape, estimate_memory
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.expert_parallel import ExpertParallel
from deep_comm.layer.mode import ModeRule
from deep_comm.layer.pending import Pending

__all__ = [
    "ExpertBatch",
    "ExpertParallel",
    "MemoryEstimate",
    "ModeRule",
    "MoEShape",
    "Pending",
    "estimate_memory",
]
