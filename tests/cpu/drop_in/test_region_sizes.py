"""Who sizes a Buffer as its release says finds room for every call, with its rows still alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_comm
from deep_comm import config, local
from deep_comm.compat import elastic_sizes, legacy
from deep_comm.compat.elastic import ElasticBuffer
from deep_comm.settings import buffer as settings

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 1024, 8, 64
RINGS = 1 << 20


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return x, idx, torch.rand(TOKENS, TOPK, generator=generator)


def hint(num_ranks: int) -> int:
    """DeepEP's recipe."""
    configs = (
        legacy.Buffer.get_dispatch_config(num_ranks), legacy.Buffer.get_combine_config(num_ranks),
    )  # fmt: skip
    return max(each.get_nvl_buffer_size_hint(2 * HIDDEN, num_ranks) for each in configs)


def native(group: Any) -> deep_comm.BufferStats:
    buffer = deep_comm.Buffer(group, hint(group.size()), device="cpu")
    x, idx, weights = inputs(group.rank())
    rows, *_, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS
    )
    buffer.combine(rows, handle)
    return buffer.stats()


def v1(group: Any) -> deep_comm.BufferStats:
    buffer = legacy.Buffer(group, hint(group.size()), device="cpu")
    x, idx, weights = inputs(group.rank())
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    rows, *_, handle, _ = buffer.dispatch(
        x, None, per_rank, per_node, mask, per_expert, idx, weights
    )
    buffer.combine(rows, handle)
    return buffer.stats()


def v2(group: Any, expand: bool = False) -> deep_comm.BufferStats:
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, device="cpu"
    )
    x, idx, weights = inputs(group.rank())
    rows, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, do_expand=expand
    )
    buffer.combine(rows, handle)
    return buffer.stats()


def v2_expanded(group: Any) -> deep_comm.BufferStats:
    return v2(group, expand=True)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("call", [native, v1, v2, v2_expanded])
def test_no_call_takes_the_rings(
    call: Any, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Regions are then no larger than the rows that are hinted at.
    for module in (config, elastic_sizes, settings):
        monkeypatch.setattr(module, "RING_BYTES", RINGS)
    monkeypatch.setattr(config.Config, "ring_bytes", lambda *sizes: 0)
    monkeypatch.setenv("DEEP_COMM_REGION_TOKENS", str(TOKENS))
    for stats in local.run(call, num_ranks, timeout_s=100):
        assert (stats.dispatch_direct, stats.dispatch_rings) == (1, 0), stats
        assert (stats.combine_direct, stats.combine_rings) == (1, 0), stats
        assert stats.receive_region_bytes < 2 * (num_ranks + 2 * TOPK) * TOKENS * 2 * HIDDEN


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sizes_of_a_model_hold_its_rows_and_stay_a_percent_of_a_gpu(num_ranks: int) -> None:
    """Hidden 7168, 4096 tokens, top-8."""
    returned = 4096 * min(num_ranks - 1, 8) * 14336
    for fp8, row_bytes in ((False, 14336), (True, 7168 + 224)):
        size = elastic_sizes.size_hint(num_ranks, 4096, 7168, 8, fp8)
        rows = max(num_ranks, 10) * 4096 * row_bytes
        assert rows + returned < size - (64 << 20) < 1.4e9
