from __future__ import annotations

from enum import Enum


class DeepEPMode(Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"

    def enable_normal(self) -> bool:
        return self in (DeepEPMode.NORMAL, DeepEPMode.AUTO)

    def enable_low_latency(self) -> bool:
        return self in (DeepEPMode.LOW_LATENCY, DeepEPMode.AUTO)

    def resolve(self, is_extend_in_batch: bool) -> DeepEPMode:
        if self != DeepEPMode.AUTO:
            return self
        return DeepEPMode.NORMAL if is_extend_in_batch else DeepEPMode.LOW_LATENCY
