"""The layer of the demo: bytes embedded, a fixed gate, small MLPs as experts.

Everything is a function of the text and of fixed seeds, and built so that a token's values do not
depend on how the tokens are spread over ranks. Only then can a distributed run be compared bit by
bit with a run in one process:

* embedding and gate hold small integers over a power of two, so that a logit is an exact integer
  sum in float32, whatever order a matrix product adds in;
* ties between experts are broken by their index;
* an expert sees its tokens of all ranks in one matrix, in global token order, in both runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_EXPERTS = 32
NUM_TOPK = 4
HIDDEN = 1024
EXPERT_WIDTH = 256

NUM_POSITIONS = 61  # prime, so that equal bytes of neighbouring lines meet different positions
EMBEDDING_SCALE = 1 / 32
LOGIT_SCALE = 1 / 4096
SEED = 20240229


def _integers(low: int, high: int, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator)


@dataclass(frozen=True)
class Tokens:
    """The whole text, before it is split over ranks."""

    x: Tensor  # bfloat16 [num_tokens, HIDDEN]
    topk_idx: Tensor  # int64 [num_tokens, NUM_TOPK]
    topk_weights: Tensor  # float32 [num_tokens, NUM_TOPK], a row sums to 1


def tokens_of(text: bytes) -> Tokens:
    """Embed and route every byte of ``text``."""
    # Sums stay within 8 bits, so bfloat16 holds them exactly.
    byte_table = _integers(-64, 64, (256, HIDDEN), SEED)
    position_table = _integers(-64, 64, (NUM_POSITIONS, HIDDEN), SEED + 1)
    gate = _integers(-8, 8, (HIDDEN, NUM_EXPERTS), SEED + 2)

    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    positions = torch.arange(len(text)) % NUM_POSITIONS
    embedded = byte_table[values] + position_table[positions]
    # At most 1024 products of at most 128 * 8: below 2**24, hence exact in float32.
    logits = (embedded.float() @ gate.float()).long()
    tie_break = torch.arange(NUM_EXPERTS).flip(0)
    topk_idx = (logits * NUM_EXPERTS + tie_break).topk(NUM_TOPK, dim=1).indices
    chosen = logits.gather(1, topk_idx).double() * LOGIT_SCALE
    return Tokens(
        x=(embedded * EMBEDDING_SCALE).to(torch.bfloat16),
        topk_idx=topk_idx,
        topk_weights=chosen.softmax(dim=1).float(),
    )


def split(num_tokens: int, num_ranks: int) -> list[int]:
    """Tokens of every rank: contiguous shares, uneven on purpose."""
    parts = [2 + (3 * rank) % 5 for rank in range(num_ranks)]
    ends = [num_tokens * sum(parts[: rank + 1]) // sum(parts) for rank in range(num_ranks)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


class Experts:
    """Two-layer MLPs with weights from fixed seeds, made when first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, expert_idx: int, rows: Tensor) -> Tensor:
        """``rows`` [num_rows, HIDDEN] through expert ``expert_idx``, as ``rows`` in all else."""
        up, down = self._weights_of(expert_idx)
        inner = torch.relu(rows.to(self._device).float() @ up)
        return (inner @ down).to(rows.dtype).to(rows.device)

    def _weights_of(self, expert_idx: int) -> tuple[Tensor, Tensor]:
        if expert_idx not in self._weights:
            generator = torch.Generator().manual_seed(SEED + 100 + expert_idx)
            up = torch.randn(HIDDEN, EXPERT_WIDTH, generator=generator) / HIDDEN**0.5
            down = torch.randn(EXPERT_WIDTH, HIDDEN, generator=generator) / EXPERT_WIDTH**0.5
            self._weights[expert_idx] = (up.to(self._device), down.to(self._device))
        return self._weights[expert_idx]
