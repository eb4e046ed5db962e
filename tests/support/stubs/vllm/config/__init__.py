"""vllm.config: what the low-latency manager asks when it is made."""

from types import SimpleNamespace


def get_current_vllm_config():
    return SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
