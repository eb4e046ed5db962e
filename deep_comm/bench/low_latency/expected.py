"""Inputs of one rank, and what low-latency calls must return for them, on its own device.

What `deep_comm.reference_low_latency` says token by token, for many rows at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import reference_low_latency
from deep_comm.bench import payload
from deep_comm.bench.low_latency.options import COMPACT
from deep_comm.bench.workload import Routing, Workload, routing_of
from deep_comm.topology import first_expert, num_local_experts


@dataclass(frozen=True)
class Arrivals:
    """Rows that a rank has after a dispatch, by their places in its output."""

    places: Tensor  # int64 [n], row in the output as one matrix
    source: Tensor  # int64 [n]
    token: Tensor  # int64 [n]
    expert: Tensor  # int64 [n], global; zeros if compact
    counts: Tensor  # int32 [L], rows of each expert


class Expected:
    """Everything of one rank per slot: the rotating inputs and routings, and the true results."""

    def __init__(
        self, workload: Workload, layout: str, rank: int, device: torch.device, max_tokens: int
    ) -> None:
        self.workload = workload
        self.is_compact = layout == COMPACT
        self.rank = rank
        self.device = device
        self.max_tokens = max_tokens
        self._first = first_expert(rank, workload.num_experts, workload.num_ranks)
        self._num_local = num_local_experts(rank, workload.num_experts, workload.num_ranks)
        # Kept per instance, so that all goes when the workload has been measured.
        self.routings = functools.cache(self._make_routings)
        self.x = functools.cache(self._make_x)
        self.arrivals = functools.cache(self._make_arrivals)
        self.expert_output = functools.cache(self._make_expert_output)
        self.combined = functools.cache(self._make_combined)
        self.bounds = functools.cache(self._make_bounds)

    @property
    def num_rows(self) -> int:
        """Of the output: N = R * M, an expert or in all."""
        return self.workload.num_ranks * self.max_tokens

    def _make_routings(self, slot: int) -> list[Routing]:
        made = [routing_of(self.workload, rank, slot) for rank in range(self.workload.num_ranks)]
        return [
            Routing(it.topk_idx.to(self.device), it.topk_weights.to(self.device)) for it in made
        ]

    def routing(self, slot: int) -> Routing:
        return self.routings(slot)[self.rank]

    def rows_between(self, slot: int) -> list[list[int]]:
        """[i][j]: tokens of rank i that rank j gets."""
        shape = self.workload
        rank_of = torch.tensor(
            [
                rank
                for rank in range(shape.num_ranks)
                for _ in range(num_local_experts(rank, shape.num_experts, shape.num_ranks))
            ]
        )
        rows = []
        for routing in self.routings(slot):
            ranks = rank_of[routing.topk_idx.cpu()]
            rows.append([int((ranks == rank).any(1).sum()) for rank in range(shape.num_ranks)])
        return rows

    def _tokens(self) -> Tensor:
        return torch.arange(self.workload.num_tokens, device=self.device)

    def _make_x(self, slot: int) -> Tensor:
        keys = payload.row_keys(self.rank, self._tokens(), slot)
        return payload.bf16_rows(keys, self.workload.hidden)

    def _make_arrivals(self, slot: int) -> Arrivals:
        topk_idx = torch.stack([routing.topk_idx for routing in self.routings(slot)])  # [R, T, K]
        local = topk_idx.flatten(0, 1) - self._first
        is_here = (local >= 0) & (local < self._num_local)
        selected = torch.zeros(
            len(local), self._num_local + 1, dtype=torch.int32, device=self.device
        )
        selected.scatter_(1, torch.where(is_here, local, self._num_local), 1)
        selected = selected[:, : self._num_local]
        counts = selected.sum(0, dtype=torch.int32)
        if self.is_compact:
            (row,) = selected.any(1).nonzero(as_tuple=True)
            places, expert = torch.arange(len(row), device=self.device), torch.zeros_like(row)
        else:
            expert, row = selected.T.nonzero(as_tuple=True)
            first = counts.cumsum(0) - counts
            ordinal = torch.arange(len(row), device=self.device) - first[expert]
            places = expert * self.num_rows + ordinal
        num_tokens = topk_idx.shape[1]
        return Arrivals(places, row // num_tokens, row % num_tokens, expert + self._first, counts)

    def _salt(self, rank: int, expert: Tensor) -> Tensor | int:
        """What an expert's rows differ by; compact rows are the rank's."""
        return 4096 + rank if self.is_compact else 1 + expert

    def _make_expert_output(self, slot: int) -> Tensor:
        """bfloat16, shaped like recv_x: what this rank hands to combine."""
        arrived = self.arrivals(slot)
        salt = self._salt(self.rank, arrived.expert)
        keys = payload.row_keys(arrived.source, arrived.token, slot, salt)
        groups = () if self.is_compact else (self._num_local,)
        shape = (*groups, self.num_rows, self.workload.hidden)
        out = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        out.view(-1, self.workload.hidden)[arrived.places] = payload.bf16_rows(
            keys, self.workload.hidden
        )
        return out

    def _partials(self, slot: int) -> Iterator[Tensor]:
        """Of this rank's tokens, by rank: its weighted rows, k ascending, not rounded."""
        routing, shape = self.routing(slot), self.workload
        tokens = self._tokens()
        for peer in range(shape.num_ranks):
            first = first_expert(peer, shape.num_experts, shape.num_ranks)
            num_local = num_local_experts(peer, shape.num_experts, shape.num_ranks)
            is_there = (routing.topk_idx >= first) & (routing.topk_idx < first + num_local)
            if self.is_compact:
                keys = payload.row_keys(self.rank, tokens, slot, 4096 + peer)
                rows = payload.bf16_rows(keys, shape.hidden).float()
                yield torch.where(is_there.any(1)[:, None], rows, 0.0)
                continue
            partial = torch.zeros(len(tokens), shape.hidden, device=self.device)
            for k in range(shape.num_topk):
                keys = payload.row_keys(self.rank, tokens, slot, 1 + routing.topk_idx[:, k])
                rows = payload.bf16_rows(keys, shape.hidden).float()
                product = rows * routing.topk_weights[:, k, None]
                partial += torch.where(is_there[:, k, None], product, 0.0)
            yield partial

    def _make_combined(self, slot: int) -> Tensor:
        """What each rank has of a token, rounded; their sum over the ranks, ascending, rounded."""
        total = torch.zeros(self.workload.num_tokens, self.workload.hidden, device=self.device)
        for partial in self._partials(slot):
            total += partial.to(torch.bfloat16).float()
        return total.to(torch.bfloat16)

    def _make_bounds(self, slot: int) -> tuple[Tensor, Tensor]:
        """The sums, and by how much they may be wrong if what ranks have travels in LogFMT-10."""
        total = torch.zeros(self.workload.num_tokens, self.workload.hidden, device=self.device)
        bound = torch.zeros_like(total)
        for partial in self._partials(slot):
            total += partial
            bound += reference_low_latency.logfmt_bound(partial)
        # Float32 arithmetic on the way, and the rounding to bf16 at its end.
        return total, bound * 1.001 + total.abs() * 2.0**-8 + 1e-30

    # ---- results -------------------------------------------------------------------------------

    def dispatch_is_right(self, result: tuple[Any, ...], slot: int) -> bool:
        rows, recv_count, handle = result[:3]
        arrived, shape = self.arrivals(slot), self.workload
        keys = payload.row_keys(arrived.source, arrived.token, slot)
        want = payload.bf16_rows(keys, shape.hidden)
        right = payload.same_bits(recv_count, arrived.counts)
        right &= payload.same_bits(
            handle.src_info.view(-1)[arrived.places], arrived.token.to(torch.int32)
        )
        if shape.dtype == "fp8":
            rows, scales = rows
            want, want_scales = reference_low_latency.quantise(want)
            got_scales = scales.reshape(-1, shape.num_scales)[arrived.places]
            right &= payload.same_bits(got_scales, want_scales)
        if shape.dtype == "nvfp4":
            rows, tiles = rows
            want, want_scales = reference_low_latency.quantise_nvfp4(want)
            got_scales = reference_low_latency.rows_of_scale_tiles(
                tiles.view(torch.uint8), self.num_rows
            )
            got_scales = got_scales.reshape(-1, 4 * shape.num_scales)[arrived.places]
            right &= payload.same_bits(got_scales, want_scales)
        bits = rows.view(-1, shape.num_columns).view(torch.uint8)[arrived.places]
        right &= payload.same_bits(bits, want.view(torch.uint8))
        return bool(right) and (not self.is_compact or self._metadata_is_right(handle, slot))

    def _metadata_is_right(self, handle: Any, slot: int) -> bool:
        arrived = self.arrivals(slot)
        routings = self.routings(slot)
        topk_idx = torch.stack([it.topk_idx for it in routings])[arrived.source, arrived.token]
        weights = torch.stack([it.topk_weights for it in routings])[arrived.source, arrived.token]
        local = topk_idx - self._first
        is_here = (local >= 0) & (local < self._num_local)
        num_rows = len(arrived.places)
        return (
            int(handle.num_recv_tokens) == num_rows
            and payload.same_bits(
                handle.recv_topk_idx[:num_rows], torch.where(is_here, local, -1).to(torch.int32)
            )
            and payload.same_bits(
                handle.recv_topk_weights[:num_rows], torch.where(is_here, weights, 0.0)
            )
        )

    def combined_is_right(self, result: tuple[Any, ...], slot: int) -> bool:
        if self.workload.combine_format == "bf16":
            return payload.same_bits(result[0], self.combined(slot))
        total, bound = self.bounds(slot)
        got: Tensor = result[0]
        is_near = (got.float() - total).abs() <= bound
        return got.shape == total.shape and bool(is_near.all())
