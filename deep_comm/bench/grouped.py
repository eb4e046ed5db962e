"""What an expanded dispatch must return on one rank, and combine of its rows; rows cast to FP8."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import reference_low_latency
from deep_comm.bench import payload
from deep_comm.bench.workload import Workload
from deep_comm.topology import first_expert, num_local_experts

if TYPE_CHECKING:
    from deep_comm.bench.expected import Expected, Rows

ALIGNMENT = 128  # of the groups, as grouped matrix products want them


def most_rows(workload: Workload) -> int:
    """Rows that the receive region has to have for an expanded output: twice what even routing
    brings, and the padding (ops/outputs.py)."""
    num_tokens = sum(workload.num_tokens_of(rank) for rank in range(workload.num_ranks))
    num_local = -(-workload.num_experts // workload.num_ranks)
    even = -(-num_tokens * workload.num_topk * num_local // workload.num_experts)
    return 2 * even + num_local * (ALIGNMENT - 1)


class Grouped:
    """Of one rank, on its device: a row for each selection here, grouped by local expert."""

    def __init__(self, expected: Expected) -> None:
        shape, rank = expected.workload, expected.rank
        self._expected = expected
        num_local = num_local_experts(rank, shape.num_experts, shape.num_ranks)
        idx = expected.recv_topk_idx
        self._row, self._selection = (idx >= 0).nonzero(as_tuple=True)
        self._expert = idx[self._row, self._selection]
        # Stable: within an expert by received row, which is (source rank, source token), and k.
        order = torch.sort(self._expert, stable=True).indices
        self._row, self._selection = self._row[order], self._selection[order]
        self._expert = self._expert[order]
        counts = torch.bincount(self._expert, minlength=num_local)
        padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.per_expert: list[int] = padded.tolist()
        self.num_rows = sum(self.per_expert)
        ordinal = (
            torch.arange(len(order), device=idx.device) - (counts.cumsum(0) - counts)[self._expert]
        )
        self._places = (padded.cumsum(0) - padded)[self._expert] + ordinal
        self._first = first_expert(rank, shape.num_experts, shape.num_ranks)
        # Kept per instance, so that all goes when the workload has been measured.
        self.outputs = functools.cache(self._make_outputs)
        self.combined = functools.cache(self._make_combined)

    def rows_are_right(self, rows: Any, slot: int) -> bool:
        """Those of tokens; padding is not written."""
        want = self._expected.recv_x(slot)
        got, wanted = (part if isinstance(part, tuple) else (part,) for part in (rows, want))
        if len(got) != len(wanted) or any(len(part) != self.num_rows for part in got):
            return False
        return all(
            payload.same_bits(_bytes(one)[self._places], _bytes(other)[self._row])
            for one, other in zip(got, wanted, strict=True)
        )

    def dispatch_is_right(self, result: Any, slot: int) -> bool:
        rows, topk_idx, topk_weights, per_expert, _, _ = result
        idx = torch.full_like(topk_idx, -1)
        idx[self._places] = self._expert.to(idx.dtype)
        weights = torch.zeros_like(topk_weights)
        weights[self._places] = self._expected.recv_topk_weights[self._row, self._selection]
        return (
            per_expert == self.per_expert
            and payload.same_bits(topk_idx, idx)
            and payload.same_bits(topk_weights, weights)
            and self.rows_are_right(rows, slot)
        )

    def _make_outputs(self, slot: int) -> Tensor:
        """bf16 [M, H]: what this rank's experts hand to combine, each another row of a token."""
        expected = self._expected
        source, token = expected.recv_src_rank[self._row], expected.recv_src_idx[self._row]
        keys = payload.row_keys(source, token, slot, 1 + self._first + self._expert)
        out = torch.zeros(
            self.num_rows, expected.workload.hidden, dtype=torch.bfloat16, device=expected.device
        )
        out[self._places] = payload.bf16_rows(keys, expected.workload.hidden)
        return out

    def _make_combined(self, slot: int) -> Tensor:
        """This rank's tokens: at each rank the weighted rows, k ascending, products and the sum
        rounded; over the ranks, ascending, once more."""
        expected, shape = self._expected, self._expected.workload
        idx, weights = expected.topk_idx, expected.topk_weights
        tokens = torch.arange(len(idx), device=idx.device)
        total = torch.zeros(len(idx), shape.hidden, device=idx.device)
        keys = [
            payload.row_keys(expected.rank, tokens, slot, 1 + idx[:, k])
            for k in range(shape.num_topk)
        ]
        products = [
            payload.bf16_rows(key, shape.hidden).float() * weights[:, k, None]
            for k, key in enumerate(keys)
        ]
        for peer in range(shape.num_ranks):
            first = first_expert(peer, shape.num_experts, shape.num_ranks)
            num_local = num_local_experts(peer, shape.num_experts, shape.num_ranks)
            is_there = (idx >= first) & (idx < first + num_local)
            partial = torch.zeros_like(total)
            for k, product in enumerate(products):
                partial += torch.where(is_there[:, k, None], product, 0.0)
            total += partial.to(torch.bfloat16).float()
        return total.to(torch.bfloat16)


def _bytes(rows: Tensor) -> Tensor:
    """torch cannot index every dtype."""
    width = rows.shape[1] * rows.element_size()
    return rows.contiguous().view(torch.uint8).view(len(rows), width)


def cast(rows: Rows) -> tuple[Tensor, Tensor]:
    """What a dispatch of these bf16 rows with use_fp8 returns."""
    assert isinstance(rows, Tensor)
    return reference_low_latency.quantise(rows)
