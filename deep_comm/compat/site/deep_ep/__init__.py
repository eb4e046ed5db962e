"""deep_ep, as deep_comm offers it: see ``deep_comm compat``."""

from typing import Any

import deep_comm as _deep_comm
from deep_comm import Config, EventHandle, EventOverlap
from deep_comm.compat.elastic import (
    ElasticBuffer,
    EPHandle,
    get_logical_domain_size,
    get_physical_domain_size,
)
from deep_comm.compat.legacy import Buffer, topk_idx_t
from deep_ep import _C, buffer, buffers, utils  # noqa: F401 - attributes without an own import

# The newest release whose names are all here, and who offers them.
__version__ = f"2.1.0+deep.comm.{_deep_comm.__version__}"

_NOT_OFFERED = {
    "HybridEPBuffer": "the hybrid-ep branch",
    "hybrid_ep_cpp": "the hybrid-ep branch",
    "EPBuffer": "V2.5",
    "EngramBuffer": "V2.5",
    "PPBuffer": "V2.5",
    "BucketBuffer": "V2.5",
    "BufferAllocator": "V2.5",
    "BufferBase": "V2.5",
}

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "buffers",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name in _NOT_OFFERED:
        raise AttributeError(
            f"deep_ep.{name} belongs to {_NOT_OFFERED[name]}; deep_comm offers Buffer and "
            "ElasticBuffer",
            name=name,
        )
    raise AttributeError(f"module 'deep_ep' has no attribute '{name}'")
