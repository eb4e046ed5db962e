"""What experts get: rows grouped by local expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class ExpertBatch:
    """Rows of this rank's L experts, grouped by expert: what ``dispatch`` returns.

    Rows of local expert e are ``x[offsets[e] : offsets[e] + num_tokens_per_expert[e]]``, by (source
    rank, source token). Every other row is padding: zeros between the groups of a prefill batch,
    anything in a decode batch. Experts return rows of the same shape; what they make of padding is
    ignored, as long as it stays in its row. Routing weights are applied by ``combine``.

    Attributes:
        x: [S, H]; float8_e4m3fn if the layer sends FP8.
        scales: float32 [S, H / 128] in that case, else None.
        num_tokens_per_expert: int32 [L] on the device.
        offsets: int32 [L + 1] on the device; first rows of groups, and the end of the last.
        counts: rows of each group on the host, padding included: multiples of the alignment that
            add up to S. None where the host does not know them: decode batches, and prefill batches
            with bounded counts.
        capacity: rows of every group in a decode batch: x is [L * capacity, H]. None: prefill.
        mode: "prefill" or "decode".
        first_expert: global index of local expert 0.
        alignment: groups of a prefill batch begin at multiples of it.
    """

    x: Tensor
    scales: Tensor | None
    num_tokens_per_expert: Tensor
    offsets: Tensor
    counts: Sequence[int] | None
    capacity: int | None
    mode: str
    first_expert: int
    alignment: int
    state: Any  # what combine needs
    _MADE_LATER: ClassVar = ("num_tokens_per_expert", "offsets")

    def __getattr__(self, name: str) -> Any:
        """Called for what is missing: tensors of a prefill batch, made when they are asked for."""
        if name not in self._MADE_LATER:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        value = self.__dict__[name] = getattr(self.state, name)
        return value

    @property
    def num_local_experts(self) -> int:
        return self.num_tokens_per_expert.shape[0]

    @property
    def is_masked(self) -> bool:
        """Groups of equal room, of which the first rows count: kernels take a count an expert."""
        return self.capacity is not None

    def masked(self, rows: Tensor | None = None) -> Tensor:
        """x, or other rows of its layout, as [L, capacity, width]. Decode batches only."""
        if self.capacity is None:
            raise ArgumentError("batch", self.mode, "must be a decode batch to have masked rows")
        rows = self.x if rows is None else rows
        return rows.view(self.num_local_experts, self.capacity, rows.shape[-1])

    def mask(self) -> Tensor:
        """bool [S], True where a row counts. No host synchronisation."""
        row = torch.arange(self.x.shape[0], device=self.x.device)
        if self.num_local_experts == 0:
            return torch.zeros_like(row, dtype=torch.bool)
        expert = torch.searchsorted(self.offsets[1:].long(), row, right=True)
        expert = expert.clamp(max=self.num_local_experts - 1)
        return row - self.offsets[expert] < self.num_tokens_per_expert[expert]

    def group_ranges(self) -> list[tuple[int, int]]:
        """(first row, rows) of each group, padding included, known without asking the device."""
        if self.capacity is not None:
            return [(e * self.capacity, self.capacity) for e in range(self.num_local_experts)]
        if self.counts is None:
            raise ArgumentError(
                "batch",
                "bounded counts",
                "has counts on the device only: use offsets with a kernel that reads them there",
            )
        ranges, first = [], 0
        for count in self.counts:
            ranges.append((first, count))
            first += count
        return ranges

    def map(self, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call ``expert(global index, rows [n, H]) -> [n, H]`` on each group: the simple way to
        compute.

        One call per expert, also for experts without rows, so that all ranks do alike. Padding is
        computed too.

        Examples:
            >>> batch = layer.dispatch(x, topk_idx, topk_weights)
            >>> y = layer.combine(batch, batch.map(lambda expert, rows: rows * (expert + 1)))
        """
        outputs = [
            expert(self.first_expert + local, self.x[first : first + count])
            for local, (first, count) in enumerate(self.group_ranges())
        ]
        if outputs:
            return torch.cat(outputs)
        return self.x.clone() if self.scales is None else self.x.to(torch.bfloat16)
