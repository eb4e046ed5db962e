"""Building a layer: what is asked for is checked, agreed on by the ranks and given a Buffer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from deep_comm import tuning
from deep_comm.buffer import Buffer
from deep_comm.context.shape import Mode, MoEShape, require_mode
from deep_comm.errors import ArgumentError
from deep_comm.ranks.rendezvous import Rendezvous
from deep_comm.ranks.topology import (
    MAX_RANKS_PER_NODE,
    num_local_experts,
    requested_ranks_per_node,
)
from deep_comm.settings import checks, env, integers


def settle(
    shape: MoEShape, rendezvous: Rendezvous, device: torch.device, is_named: bool
) -> MoEShape:
    """The shape, with the decode_tokens that rank 0 has measured unless they are named.

    Ranks of several hosts may have measured different things. Collective.
    """
    is_named = is_named or env.DECODE_TOKENS.is_set()

    def propose() -> int | None:
        if is_named:
            return None
        return tuning.decode_tokens(
            device, rendezvous.size, shape.hidden, shape.num_topk, shape.num_experts
        )

    measured = rendezvous.all_gather_result("read what was measured", propose)[0]
    if measured is None or is_named:
        return shape
    return dataclasses.replace(shape, decode_tokens=min(measured, shape.max_tokens))


def check_options(
    shape: MoEShape, mode: Mode, expert_alignment: int, max_recv_rows: int | None
) -> None:
    require_mode(mode, shape)
    checks.expert_alignment(expert_alignment)
    if max_recv_rows is not None:
        integers.require("max_recv_rows", max_recv_rows, 1, integers.LARGEST)


def most_rows(shape: MoEShape, num_ranks: int, expert_alignment: int) -> int:
    """That a rank can ever get: every selection there is, and a padding behind each group."""
    num_local = num_local_experts(0, shape.num_experts, num_ranks)
    selections = num_ranks * shape.max_tokens * shape.num_topk
    return selections + num_local * (expert_alignment - 1)


def num_nodes_of(num_ranks: Any, ranks_per_node: int | None) -> int:
    """Of a group that does not exist yet; the fewest that can be, if nobody says."""
    integers.require("num_ranks", num_ranks, 1)
    per_node = requested_ranks_per_node(ranks_per_node)
    if per_node is None:
        most = min(num_ranks, MAX_RANKS_PER_NODE)
        per_node = next(size for size in range(most, 0, -1) if num_ranks % size == 0)
    if num_ranks % min(per_node, num_ranks) != 0:
        raise ArgumentError("ranks_per_node", per_node, f"must divide num_ranks ({num_ranks})")
    return num_ranks // min(per_node, num_ranks)


def build_buffer(
    shape: MoEShape,
    mode: Mode,
    group: Any,
    comm: Any,
    device: Any,
    ranks_per_node: int | None,
    timeout_s: float | None,
) -> Buffer:
    """A Buffer that is large enough. Collective."""
    return Buffer.for_shape(
        group,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        max_tokens=shape.max_tokens,
        decode_tokens=shape.decode_tokens,
        mode=mode,
        dtype=shape.dtype,
        fp8=shape.fp8,
        comm=comm,
        device=device,
        ranks_per_node=ranks_per_node,
        timeout_s=timeout_s,
    )


def require_alike(
    rendezvous: Rendezvous,
    shape: MoEShape,
    mode: Mode,
    expert_alignment: int,
    max_recv_rows: int | None,
    ranks_per_node: int | None,
) -> None:
    """ConfigMismatch on all ranks if they want different layers. Collective, and before a Buffer is
    built: its sizes follow from these, and would be named instead."""
    rendezvous.require_equal(
        {
            "hidden": shape.hidden,
            "num_experts": shape.num_experts,
            "num_topk": shape.num_topk,
            "max_tokens": shape.max_tokens,
            "decode_tokens": shape.decode_tokens,
            "mode": mode,
            "dtype": str(shape.dtype),
            "fp8": shape.fp8,
            "expert_alignment": expert_alignment,
            "max_recv_rows": max_recv_rows,
            "ranks_per_node": ranks_per_node,
        }
    )


def require_decode(buffer: Buffer, shape: MoEShape) -> None:
    """The Buffer's own words for what it lacks."""
    buffer.low_latency_num_blocks(shape.num_slots, shape.hidden, 1, shape.num_experts)
