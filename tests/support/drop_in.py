"""Makes ``import deep_ep`` the drop-in, in this process and in the ranks it
starts; a small MoE layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deep_comm import local
from deep_comm.compat.installer import SITE
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import first_expert, num_local_experts
from deep_comm.settings import env

if str(SITE) not in sys.path:
    sys.path.insert(0, str(SITE))

NUM_EXPERTS, NUM_TOPK, HIDDEN = 16, 4, 256


def vllm_quant(kind: str) -> SimpleNamespace:
    """What vLLM says of how experts take their rows."""
    fp8 = kind == "fp8"
    return SimpleNamespace(
        is_block_quantized=fp8, quant_dtype=torch.float8_e4m3fn if fp8 else None,
        block_shape=[128, 128] if fp8 else None, per_act_token_quant=False, a1_scale=None,
        a1_gscale=None, a2_scale=None, is_scale_swizzled=True,
    )  # fmt: skip


def device() -> torch.device:
    if torch.cuda.is_available() and env.DEVICE.get() != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def routed(
    rank: int,
    num_tokens: int,
    *,
    hidden: int = HIDDEN,
    num_topk: int = NUM_TOPK,
    routing: str = "distinct",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] bfloat16, topk_idx int64 [T, K], topk_weights float32 [T, K].

    Small integers and halves, so that every order of summation gives the same bfloat16.
    ``routing``: "distinct", "holes" (-1 here and there), "padded" (the last third of the rows has
    no expert), "duplicates" (experts twice in a row, weights of any sign).
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(-3, 4, (num_tokens, hidden), generator=generator).to(torch.bfloat16)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(num_topk).indices
    weights = torch.full((num_tokens, num_topk), 0.5)
    if routing == "holes":
        idx = torch.where(torch.rand(idx.shape, generator=generator) < 0.4, -1, idx)
    if routing == "padded":
        idx[num_tokens - (num_tokens + 2) // 3 :] = -1
    if routing == "duplicates":
        idx = torch.randint(0, NUM_EXPERTS, idx.shape, generator=generator)
        sign = torch.randint(0, 2, idx.shape, generator=generator) * 2 - 1
        weights = weights * sign
    return tuple(part.to(device()) for part in (x, idx, weights))  # type: ignore[return-value]


def dense(x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
    """The layer in one process: expert e multiplies by e + 1."""
    scale = torch.where(topk_idx >= 0, (topk_idx + 1) * weights, 0.0)
    return x.float() * scale.sum(dim=1, keepdim=True)


def num_tokens_of(rank: int) -> int:
    """Different on each rank, none on rank 1."""
    return 0 if rank == 1 else 9 + 3 * rank


def first_of(rank: int, num_ranks: int) -> int:
    return first_expert(rank, NUM_EXPERTS, num_ranks)


def num_local_of(rank: int, num_ranks: int) -> int:
    return num_local_experts(rank, NUM_EXPERTS, num_ranks)


def local_experts(rows: Tensor, local_idx: Tensor, weights: Tensor, first: int) -> Tensor:
    """Sum of the weighted outputs of this rank's experts for rows that came once."""
    scale = torch.where(local_idx >= 0, (local_idx + first + 1) * weights, 0.0)
    return (rows.float() * scale.sum(dim=1, keepdim=True)).to(torch.bfloat16)


def masked_experts(rows: Tensor, counts: Tensor, first: int) -> Tensor:
    """[L, N, H] rows, only the first counts[l] of which mean anything."""
    out = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = (rows[expert, :count].float() * (first + expert + 1)).to(out.dtype)
    return out


def dequantised(fp8: Tensor, scales: Tensor) -> Tensor:
    """[..., H] of e4m3 with float32 scales [..., H / 128], or their exponents, four in an int32."""
    if scales.dtype == torch.int32:
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        exponents = (scales.unsqueeze(-1) >> shifts & 255).flatten(-2)
        scales = (exponents << 23).view(torch.float32)
    return (fp8.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)


def dequantised_nvfp4(rows: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """float32 [L, N, H] of [N, H / 2, L] and [32, 4, tiles, 4, H / 64, L]."""
    rows = rows.permute(2, 0, 1)
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    table = torch.tensor(numbers, device=rows.device)
    values = torch.stack((table[(rows & 15).long()], table[(rows >> 4).long()]), dim=-1).flatten(-2)
    num_local, num_slots, hidden = values.shape
    # [L, tile, 4, 32, words, 4] is row by row.
    of_rows = scales.permute(5, 2, 1, 0, 4, 3).float().reshape(num_local, -1, hidden // 16)
    of_rows = of_rows[:, :num_slots] / global_scale
    return (values.unflatten(-1, (-1, 16)) * of_rows.unsqueeze(-1)).flatten(-2)


def barrier(group: Any) -> None:
    Rendezvous(group).barrier()


def finish(group: Any) -> None:
    """What was launched has run, on every rank."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    barrier(group)


def alone(fn: Callable[[Any], Any]) -> Any:
    """``fn(group)`` in a group of one."""
    return local.run(fn, 1, timeout_s=60)[0]
