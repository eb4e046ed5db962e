"""Every public call of a Buffer, a layer and a Config has an example in its docstring, and they
run."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest
import torch

import deep_comm
import deep_comm.local

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK, MOST = 2, 5, 128, 4, 2, 8
CLASSES = (
    deep_comm.Buffer,
    deep_comm.ExpertParallel,
    deep_comm.ExpertBatch,
    deep_comm.Config,
    deep_comm.EventHandle,
    deep_comm.EventOverlap,
)
# What the examples of others show.
WITHOUT = {
    "ExpertBatch", "ExpertBatch.group_ranges", "ExpertBatch.mask", "ExpertBatch.masked",
    "EventHandle.current_stream_wait", "EventHandle.of", "EventHandle.stream_wait",
    "EventOverlap.current_stream_wait", "ExpertParallel.destroy", "ExpertParallel.extra_repr",
}  # fmt: skip


def _documented() -> dict[str, str]:
    """Docstrings by name, of classes and of their public methods; torch describes its own."""
    found = {}
    for cls in CLASSES:
        found[cls.__name__] = cls.__doc__ or ""
        for name, value in inspect.getmembers(cls, callable):
            own = (getattr(value, "__module__", None) or "deep_comm").startswith("deep_comm")
            if own and not name.startswith(("_", "internode_")):
                found[f"{cls.__name__}.{name}"] = inspect.getdoc(value) or ""
    return found


DOCUMENTED = _documented()
PARSED = {name: doctest.DocTestParser().get_examples(doc) for name, doc in DOCUMENTED.items()}


def test_every_public_call_has_an_example() -> None:
    assert len(PARSED) > 40
    missing = [name for name, found in PARSED.items() if not found and name not in WITHOUT]
    assert not missing, missing
    needless = [name for name in WITHOUT if PARSED.get(name, ["gone"])]
    assert not needless, needless


@pytest.mark.parametrize("name", [name for name, found in PARSED.items() if found])
def test_examples_run(name: str) -> None:
    def rank_main(group: Any) -> None:
        torch.manual_seed(group.rank())
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS)
        with (
            deep_comm.Buffer(group, 1 << 22, num_bytes, True, device="cpu") as buffer,
            deep_comm.ExpertParallel(
                group, hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens=MOST,
                device="cpu",
            ) as layer,
            torch.inference_mode(),
        ):  # fmt: skip
            weights, topk_idx = torch.rand(TOKENS, EXPERTS).softmax(-1).topk(TOPK)
            names = {
                "torch": torch, "deep_comm": deep_comm, "group": group, "buffer": buffer,
                "layer": layer, "x": torch.randn(TOKENS, HIDDEN).bfloat16(), "topk_idx": topk_idx,
                "topk_weights": weights, "rank": group.rank(), "R": RANKS, "T": TOKENS,
                "H": HIDDEN, "E": EXPERTS, "K": TOPK, "M": MOST,
            }  # fmt: skip
            for example in PARSED[name]:
                exec(compile(example.source, f"<{name}>", "exec"), names)

    num_sms = deep_comm.Buffer.num_sms
    try:
        deep_comm.local.run(rank_main, RANKS)
    finally:
        deep_comm.Buffer.num_sms = num_sms
