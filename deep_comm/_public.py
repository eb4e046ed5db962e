"""The names of ``deep_comm``, which loads them when the first one is used."""

from __future__ import annotations

import torch

from deep_comm.backends import Availability, is_available
from deep_comm.buffer import Buffer
from deep_comm.config import Config
from deep_comm.context.stats import BufferStats, PerformanceWarning
from deep_comm.errors import (
    AllocationError,
    ArgumentError,
    BufferDestroyed,
    BufferTooSmall,
    CallInterrupted,
    CapacityError,
    ConfigMismatch,
    DeepCommError,
    ExpertIndexError,
    HandleMismatch,
    MaskedOut,
    PeerLost,
    PeerTimeout,
    TopologyError,
    UnsupportedArgument,
    UnsupportedError,
)
from deep_comm.events import EventHandle, EventOverlap
from deep_comm.handle import Handle, InternodeHandle
from deep_comm.layer import ExpertBatch, ExpertParallel
from deep_comm.results import (
    CombineResult,
    DispatchLayout,
    DispatchResult,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
)

topk_idx_t: torch.dtype = torch.int64
"""The usual dtype of topk_idx; int32 is taken as well."""

__all__ = [
    "AllocationError",
    "ArgumentError",
    "Availability",
    "Buffer",
    "BufferDestroyed",
    "BufferStats",
    "BufferTooSmall",
    "CallInterrupted",
    "CapacityError",
    "CombineResult",
    "Config",
    "ConfigMismatch",
    "DeepCommError",
    "DispatchLayout",
    "DispatchResult",
    "EventHandle",
    "EventOverlap",
    "ExpertBatch",
    "ExpertIndexError",
    "ExpertParallel",
    "Handle",
    "HandleMismatch",
    "InternodeHandle",
    "LowLatencyCombineResult",
    "LowLatencyDispatchResult",
    "MaskedOut",
    "PeerLost",
    "PeerTimeout",
    "PerformanceWarning",
    "TopologyError",
    "UnsupportedArgument",
    "UnsupportedError",
    "is_available",
    "topk_idx_t",
]
