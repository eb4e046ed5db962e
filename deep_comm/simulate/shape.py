"""Sizes of what `deep_comm simulate` runs. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Shapes of one run; the contents follow from the seed."""

    num_ranks: int = 4
    num_tokens: int = 16  # of each rank
    hidden: int = 64  # bfloat16 elements
    num_experts: int = 8
    num_topk: int = 2
    num_sms: int = 1
    num_slots: int = 4  # of a ring
