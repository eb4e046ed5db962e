"""What tests of a Buffer's calls with few small tokens share: groups, inputs, forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from on_buffers import on_buffers

import deep_comm
from deep_comm import local

R, T, M, H, K, E = 2, 7, 9, 256, 3, 6

# Forms of dispatches that cast rows on their way.
CASTS: dict[str, dict[str, bool]] = {
    "cast": dict(use_fp8=True),
    "cast-ue8m0": dict(use_fp8=True, round_scale=True, use_ue8m0=True),
}


def on_ranks(body: Callable[[Any, int], Any], num_ranks: int = R, **options: Any) -> list[Any]:
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, num_ranks, E)
    return on_buffers(
        lambda buffer: body(buffer, buffer.rank), num_ranks, 0, num_bytes, low_latency_mode=True,
        timeout_s=20, **options,
    )  # fmt: skip


Told = list[tuple[int, int]]


def on_streams(body: Callable[[Any, fake_cuda.Log, Told], None]) -> None:
    """One rank, over streams that a log keeps. ``told`` has (address, stream) of each
    record_stream."""
    told: Told = []

    def main(group: local.ThreadGroup) -> None:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(M, H, 1, E)
        with deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, timeout_s=20) as buffer:
            body(buffer, log, told)

    with fake_cuda.installed() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "record_stream",
            lambda tensor, stream: told.append((tensor.data_ptr(), stream.cuda_stream)),
        )  # fmt: skip
        local.run(main, 1, timeout_s=60)


def inputs(rank: int, num_tokens: int = T, idx_dtype: torch.dtype = torch.int64) -> Any:
    generator = torch.Generator().manual_seed(17 + rank)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices.to(idx_dtype)
    if num_tokens > 2:
        idx[2, 1] = -1
    return x, idx, torch.rand(num_tokens, K, generator=generator)


def layout_of(buffer: Any, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """What dispatch takes of a layout."""
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(idx, E)
    given = dict(
        num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=mask
    )
    return given if per_node is None else {**given, "num_tokens_per_rdma_rank": per_node}


def routing_bytes(handle: deep_comm.Handle) -> int:
    """Of the routing block, whose parts begin at multiples of 16 bytes."""
    parts = [
        4 * handle.num_ranks**2, 4 * handle.channel_prefix_matrix.numel(),
        4 * handle.recv_channel_prefix_matrix.numel(),
        4 * handle.num_recv_tokens_per_expert.numel(), 4 * handle.send_head.numel(),
        4 * (1 + handle.num_ranks), handle.is_token_in_rank.numel(),
    ]  # fmt: skip
    return -(-sum(-(-part // 16) * 16 for part in parts) // 128) * 128


class Marked(torch.Tensor):
    """A subclass may mean anything."""


def on_normal(body: Callable[[Any, int], Any], num_ranks: int = R, **options: Any) -> None:
    on_buffers(
        lambda buffer: body(buffer, buffer.rank), num_ranks, 8 << 20, timeout_s=20, **options
    )


def to_rank(rank: int, num_tokens: int) -> dict[str, Any]:
    """All tokens to one expert of ``rank``."""
    x = torch.arange(num_tokens * H).view(num_tokens, H).bfloat16()
    idx = torch.full((num_tokens, K), -1)
    idx[:, 0] = rank * (E // R)
    return dict(x=x, topk_idx=idx, topk_weights=torch.ones(num_tokens, K), num_experts=E)


def parts_of(payload: Any) -> list[torch.Tensor]:
    return list(payload) if isinstance(payload, tuple) else [payload]
