"""What a run has found of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from deep_comm.bench.measure import Timing
from deep_comm.bench.workload import Volume, Workload


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        volume: of the rank that moves most; None: moves no rows.
        mode: "direct", "ring", "two-tier": observed, not asked for; "" for rivals.
        layout, phases, max_tokens, kernels_us: of low-latency calls.
        sms: "24", or "auto 20"; "" for rivals.
        config: (rows between two publications, slots); None: the Buffer's choice.
        limit: GB/s of the links; None: not measured.
        rail_bytes: of a call, on the busiest rail; None: one tier.
        rail_limit: GB/s that a rail can do; None: not said.
    """

    workload: Workload
    name: str
    execution: str
    timing: Timing
    volume: Volume | None
    mode: str = ""
    layout: str = ""
    phases: str = ""
    sms: str = ""
    num_sms: int | None = None
    config: tuple[int, int] | None = None
    max_tokens: int | None = None
    host_waits: bool = False
    is_rival: bool = False
    limit: float | None = None
    kernels_us: dict[str, float] = field(default_factory=dict)
    rail_bytes: int | None = None
    rail_limit: float | None = None

    def rate(self, num_bytes: int) -> float:
        """GB/s (10^9 bytes per second) at the mean time."""
        return num_bytes / self.timing.mean_us / 1e3

    def to_json(self) -> dict[str, Any]:
        shape, moved, limit = self.workload, self.volume, self.limit
        not_here = ("workload", "timing", "volume", "limit", "rail_limit")
        found = {name: value for name, value in vars(self).items() if name not in not_here}
        names = ("num_tokens", "dtype", "combine_format", "routing", "row_bytes",
                 "combine_row_bytes")  # fmt: skip
        found |= asdict(self.timing) | {name: getattr(shape, name) for name in names}
        found |= {"workload": shape.describe(), "num_blocks": self.num_sms, "num_wrong": 0}
        if moved is not None:
            wire_rate = self.rate(moved.wire_bytes)
            found |= asdict(moved) | {
                "logical_gb_per_s": self.rate(moved.logical_bytes),
                "wire_gb_per_s": wire_rate,
                "fraction_of_limit": None if limit is None else wire_rate / limit,
                "floor_us": None if limit is None else moved.wire_bytes / limit / 1e3,
            }
        if self.rail_bytes is not None:
            rate = self.rate(self.rail_bytes)
            share = None if self.rail_limit is None else rate / self.rail_limit
            found |= {"rail_gb_per_s": rate, "rail_share": share}
        return found
