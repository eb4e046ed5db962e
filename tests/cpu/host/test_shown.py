"""What objects say of themselves, and whether a device can be used."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import deep_comm
from deep_comm import local

SHAPE: dict[str, Any] = dict(hidden=64, num_experts=4, num_topk=2, max_tokens=8)


def shown(group: Any) -> list[str]:
    with deep_comm.Buffer.for_shape(group, **SHAPE, device="cpu") as buffer:
        x = torch.zeros(3, 64, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 1], [2, 3], [0, 3]])
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(3, 2), num_experts=4)[4]
        low_latency = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)[2]
        texts = [repr(buffer), repr(handle), repr(low_latency)]
    return [*texts, repr(buffer)]


def test_objects_say_in_a_line_what_they_are() -> None:
    for rank, texts in enumerate(local.run(shown, 2, timeout_s=60)):
        buffer, handle, low_latency, destroyed = texts
        assert buffer.startswith(f"<Buffer: rank {rank} of 2, cpu, ")
        assert destroyed == buffer.removesuffix(">") + ", destroyed>"
        assert handle.startswith(f"Handle(rank={rank}, num_experts=4, num_topk=2, num_recv_tokens=")
        assert low_latency == (
            f"LowLatencyHandle(rank={rank}, num_tokens=3, num_max_dispatch_tokens_per_rank=8, "
            "hidden=64, num_experts=4, num_topk=2, is_compact=False)"
        )
        assert all(len(text) < 200 for text in texts), texts


def test_a_device_that_can_be_used_is_available() -> None:
    usable = deep_comm.is_available("cpu")
    assert usable and usable.reason == ""


def test_what_is_missing_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: str) -> str:
        usable = deep_comm.is_available(device)
        assert not usable
        return usable.reason

    assert "must be a CPU or CUDA device" in reason("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA device" in reason("cuda")
    monkeypatch.setitem(sys.modules, "deep_comm.backends.cpu", None)
    assert "the native module deep_comm._core cannot be loaded" in reason("cpu")
