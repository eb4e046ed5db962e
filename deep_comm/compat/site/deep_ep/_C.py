"""The names of V2's native module that callers reach for."""

from deep_comm import Config, EventHandle
from deep_comm.compat.legacy import Buffer, topk_idx_t

get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = Buffer.is_sm90_compiled

__all__ = [
    "Config",
    "EventHandle",
    "get_low_latency_rdma_size_hint",
    "is_sm90_compiled",
    "topk_idx_t",
]
