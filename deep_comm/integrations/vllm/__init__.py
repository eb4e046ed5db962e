"""vLLM: all-to-all manager and prepare/finalize of the modular MoE kernel over deep_comm.

``register()`` puts them in the place of vLLM's DeepEP backends in this process; installed,
deep_comm is a vLLM plugin that does so in every process of a server started with
``DEEP_COMM_VLLM=1``. See docs/guide/vllm.md.
"""

from deep_comm.integrations.vllm.low_latency import LowLatencyPrepareFinalize
from deep_comm.integrations.vllm.manager import (
    DeepCommAll2AllManager,
    LowLatencyManager,
    NormalManager,
)
from deep_comm.integrations.vllm.normal import NormalPrepareFinalize
from deep_comm.integrations.vllm.plugin import register

__all__ = [
    "DeepCommAll2AllManager",
    "LowLatencyManager",
    "LowLatencyPrepareFinalize",
    "NormalManager",
    "NormalPrepareFinalize",
    "register",
]
