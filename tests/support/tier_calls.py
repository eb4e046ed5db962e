"""Calls between nodes in all their forms, against the reference: what every rank gives follows from
its number and its tokens, so that each rank can say what all of them must get."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from payload import assert_same_bits
from small_calls import E, form_of

from deep_comm import reference
from deep_comm.ranks.topology import num_local_experts
from deep_comm.reference import internode as reference_internode

ALIGNMENTS = {"aligned": 4, "padded": 4}
FIELDS = (
    "rdma_channel_prefix_matrix", "gbl_channel_prefix_matrix", "recv_rdma_channel_prefix_matrix",
    "recv_rdma_rank_prefix_sum", "recv_gbl_channel_prefix_matrix", "recv_gbl_rank_prefix_sum",
    "send_rdma_head",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """Calls of all ranks: a form of small_calls.form_of, tokens by rank, a bound of rows or 0."""

    form: str
    tokens: tuple[int, ...]
    ranks_per_node: int
    bound: int = 0

    @property
    def alignment(self) -> int:
        return ALIGNMENTS.get(self.form, 1)

    def given(self, rank: int) -> tuple[Any, dict[str, Any]]:
        x, options = form_of(self.form, rank, self.tokens[rank])
        options["expert_alignment"] = self.alignment
        return x, options


@functools.cache
def wanted(
    call: Call, num_channels: int, is_expanded: bool = False
) -> list[reference_internode.InternodeDispatched]:
    """Of a plain dispatch, by rank; of an expanded one with all its rows."""
    given = [call.given(rank) for rank in range(len(call.tokens))]
    has_weights = "topk_weights" in given[0][1]
    return reference_internode.dispatch(
        [x for x, _ in given],
        [options["topk_idx"] for _, options in given],
        E,
        call.ranks_per_node,
        [options["topk_weights"] for _, options in given] if has_weights else None,
        num_channels=num_channels,
        expert_alignment=call.alignment,
        num_worst_tokens=0 if is_expanded else call.bound,
    )


def rows_of(payload: Any) -> list[torch.Tensor]:
    return list(payload) if isinstance(payload, tuple) else [payload]


def require_received(call: Call, received: tuple[Any, ...], rank: int) -> None:
    """What dispatch returned, and its handle."""
    payload, idx, weights, counts, handle, _ = received
    want = wanted(call, handle.num_channels)[rank]
    plain, num = want.received, want.received.num_recv_tokens
    parts = [plain.recv_x] if plain.recv_x_scales is None else [plain.recv_x, plain.recv_x_scales]
    for got, part in zip(rows_of(payload), parts, strict=True):
        assert got.shape == part.shape
        assert_same_bits(got[:num], part[:num], f"rank {rank}: rows")
    assert_same_bits(idx, plain.recv_topk_idx, f"rank {rank}: indices")
    assert (weights is None) == (plain.recv_topk_weights is None)
    if weights is not None:
        assert_same_bits(weights, plain.recv_topk_weights, f"rank {rank}: weights")
    assert counts == plain.num_recv_tokens_per_expert
    require_handle(call, handle, want, rank)


def require_handle(
    call: Call, handle: Any, want: reference_internode.InternodeDispatched, rank: int
) -> None:
    def same(name: str, got: torch.Tensor, part: torch.Tensor) -> None:
        assert_same_bits(got, part, f"rank {rank}: handle.{name}")

    plain, num = want.received, want.received.num_recv_tokens
    num_ranks, num_forward = len(call.tokens), len(want.send_nvl_head)
    same("is_token_in_rank", handle.is_token_in_rank, plain.is_token_in_rank)
    for name in FIELDS:
        same(name, getattr(handle, name), getattr(want, name))
    same("recv_src_idx", handle.recv_src_idx[:num], plain.recv_src_idx[:num])
    same("recv_src_meta", handle.recv_src_meta[:num].view(torch.int32), want.recv_src_meta)
    same("send_nvl_head", handle.send_nvl_head[:num_forward], want.send_nvl_head)
    by_source = torch.diff(want.recv_gbl_rank_prefix_sum, prepend=torch.zeros(1, dtype=torch.int32))
    same("num_recv_tokens_per_rank", handle.num_recv_tokens_per_rank, by_source)
    assert handle.num_recv_tokens_tensor.tolist() == [num]
    per_expert = torch.bincount(
        plain.recv_topk_idx[plain.recv_topk_idx >= 0].long(),
        minlength=num_local_experts(rank, E, num_ranks),
    )
    aligned = -(-per_expert // call.alignment) * call.alignment
    assert handle.num_recv_tokens_per_expert.tolist() == aligned.tolist()
    counted = (num, max(call.tokens)) if call.bound == 0 else (None, None)
    assert (handle.num_recv_tokens, handle.max_num_tokens) == counted
    assert (handle.num_returning_rows is None) == (call.bound != 0)
    shape = (handle.rank, handle.num_experts, handle.num_topk, handle.num_tokens)
    assert shape == (rank, E, plain.recv_topk_idx.shape[1], call.tokens[rank])
    assert (handle.num_nodes, handle.num_ranks) == (num_ranks // call.ranks_per_node, num_ranks)
    if call.bound == 0:
        assert (handle.num_recv_rows, handle.num_forward_rows) == (num, num_forward)


def summands(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Received rows as combine takes them; no numbers where none has come."""
    filled = torch.ones(rows.shape, dtype=torch.bfloat16)
    filled[:num_rows] = rows[:num_rows].bfloat16().nan_to_num(1.0)
    return filled


def wanted_sums(call: Call, num_channels: int) -> list[tuple[Any, Any]]:
    """Of a combine of those rows, with the weights that have come."""
    want = wanted(call, num_channels)
    has_weights = want[0].received.recv_topk_weights is not None
    return reference_internode.combine(
        [summands(each.received.recv_x, each.received.num_recv_tokens) for each in want],
        want,
        [each.received.recv_topk_weights for each in want] if has_weights else None,
    )


def wanted_expansion(call: Call, num_channels: int, rank: int) -> reference.Expanded:
    plain = wanted(call, num_channels, is_expanded=True)[rank].received
    num_local = num_local_experts(rank, E, len(call.tokens))
    return reference.expand(plain, num_local, call.alignment, call.bound)


def wanted_expanded_sums(call: Call, num_channels: int) -> list[tuple[Any, Any]]:
    """Of a combine that multiplies expanded rows with their weights, if there are any."""
    want = wanted(call, num_channels, is_expanded=True)
    reduced = []
    for rank in range(len(call.tokens)):
        rows = wanted_expansion(call, num_channels, rank)
        values = rows.recv_x.bfloat16().nan_to_num(1.0)
        values[rows.recv_topk_idx < 0] = 1.0
        reduced.append(reference.reduce_experts(values, rows, rows.recv_topk_weights))
    return reference_internode.combine(reduced, want)
