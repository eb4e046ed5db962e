"""Figures that others have published for dispatch and combine over nodes of 8 GPUs, and where.

All: 7168 columns, top-8, FP8 dispatch and BF16 combine; 4096 tokens per rank in normal
mode, 128 in low-latency mode.
"""

from __future__ import annotations

from dataclasses import dataclass

DEEPEP = "DeepEP V1"  # deepseek-ai/DeepEP, docs/legacy.md: H800, ConnectX-7 of 400 Gb/s
PPLX = (
    "DeepEP V1 by pplx"  # perplexityai/pplx-garden, docs/fabric-lib.md: ConnectX-7, GPU not named
)


@dataclass(frozen=True)
class Figure:
    system: str
    mode: str  # "normal" or "low latency"
    num_ranks: int
    routing: str
    dispatch: float  # microseconds; of DEEPEP's normal mode GB/s, see `is_rate`
    combine: float
    fitted: str = ""  # which of the two a parameter of the model was fitted to

    @property
    def is_rate(self) -> bool:
        """GB/s of rows that a rank sends to nodes, its own among them; inside a node: to ranks."""
        return self.system == DEEPEP and self.mode == "normal"


FIGURES = (
    Figure(DEEPEP, "normal", 8, "limited", 153, 158, fitted="dispatch"),
    Figure(DEEPEP, "normal", 16, "limited", 43, 43),
    Figure(DEEPEP, "normal", 32, "limited", 58, 57),
    Figure(DEEPEP, "normal", 64, "limited", 51, 50),
    Figure(DEEPEP, "low latency", 8, "uniform", 77, 114),
    Figure(DEEPEP, "low latency", 16, "uniform", 118, 195, fitted="dispatch"),
    Figure(DEEPEP, "low latency", 32, "uniform", 155, 273),
    Figure(DEEPEP, "low latency", 64, "uniform", 173, 314),
    Figure(DEEPEP, "low latency", 128, "uniform", 192, 369),
    Figure(DEEPEP, "low latency", 256, "uniform", 194, 360),
    Figure(PPLX, "normal", 16, "uniform", 2481.9, 1863.9),
    Figure(PPLX, "normal", 32, "uniform", 3680.2, 3565.4),
    Figure(PPLX, "normal", 64, "uniform", 5071.6, 5922.7),
    Figure(PPLX, "low latency", 16, "uniform", 123.9, 203.0),
    Figure(PPLX, "low latency", 32, "uniform", 159.1, 285.0),
    Figure(PPLX, "low latency", 64, "uniform", 177.9, 325.0),
)
