"""vLLM's interfaces as stand-ins, and what their tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support" / "stubs"))


@pytest.fixture
def vllm_defaults(on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small buffer; what ``register`` exchanges is as before afterwards."""
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import all2all_utils

    monkeypatch.setenv("VLLM_DEEPEP_BUFFER_SIZE_MB", "16")
    for name in ("DeepEPHTAll2AllManager", "DeepEPLLAll2AllManager"):
        monkeypatch.setattr(all2all, name, getattr(all2all, name))
    for name in ("DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"):
        monkeypatch.setattr(all2all_utils, name, getattr(all2all_utils, name))
