"""The same job by torch.distributed: NCCL on GPUs, gloo on the host. Checked like everything
else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from deep_comm.bench import payload
from deep_comm.bench.expected import Expected, Rows
from deep_comm.bench.measure import nccl_group
from deep_comm.bench.operations import Operation
from deep_comm.bench.workload import Volume, dispatch_volume, rows_between

ALL_TO_ALL = "all_to_all_single"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"


# The names of newer versions of torch, which warn about the older ones.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def as_bytes(rows: Rows) -> Tensor:
    """uint8 [n, row_bytes]: a row with its scales behind it."""
    if isinstance(rows, Tensor):
        return rows.view(torch.uint8)
    return torch.cat([part.view(torch.uint8) for part in rows], dim=1)


def operations(expected: Expected) -> Iterator[Operation]:
    """Rows already sorted and counted for all_to_all_single; the collectives that need neither."""
    on_gpu = expected.device.type == "cuda"
    library = "NCCL" if on_gpu else "gloo"
    group = nccl_group() if on_gpu else dist.group.WORLD
    yield _all_to_all(expected, library, group)
    yield all_gather(expected, library, group)
    yield reduce_scatter(expected, library, group)


def _all_to_all(expected: Expected, library: str, group: dist.ProcessGroup | None) -> Operation:
    rows = rows_between(expected.workload)
    rank = expected.rank
    send_sizes, recv_sizes = rows[rank], [sent[rank] for sent in rows]
    mask = expected.plan.is_token_in_rank.to(expected.device)
    order = torch.cat([mask[:, peer].nonzero().squeeze(1) for peer in range(len(rows))])
    sorted_rows: dict[int, Tensor] = {}
    out = as_bytes(expected.recv_x(0)).clone()

    def call(slot: int) -> Tensor:
        if slot not in sorted_rows:
            sorted_rows[slot] = as_bytes(expected.x(slot))[order].contiguous()
        dist.all_to_all_single(out, sorted_rows[slot], recv_sizes, send_sizes, group=group)
        return out

    return Operation(
        f"{library} {ALL_TO_ALL}",
        call,
        lambda result, slot: payload.same_bits(result, as_bytes(expected.recv_x(slot))),
        dispatch_volume(expected.workload, is_cached=True),
        is_rival=True,
    )


def _collective_volume(expected: Expected, row_bytes: int) -> Volume:
    """Every rank's rows to or from every rank."""
    shape = expected.workload
    block = shape.num_tokens * row_bytes
    return Volume(shape.num_ranks * block, (shape.num_ranks - 1) * block)


def all_gather(expected: Expected, library: str, group: dist.ProcessGroup | None) -> Operation:
    """Dispatch without routing: every rank gets all tokens. A rank with fewer sends padding."""
    shape = expected.workload
    padded: dict[int, Tensor] = {}
    out = torch.empty(
        shape.num_ranks * shape.num_tokens,
        shape.row_bytes,
        dtype=torch.uint8,
        device=expected.device,
    )

    def call(slot: int) -> Tensor:
        if slot not in padded:
            rows = as_bytes(expected.x(slot))
            padded[slot] = rows.new_zeros(shape.num_tokens, shape.row_bytes)
            padded[slot][: len(rows)] = rows
        _all_gather_single(out, padded[slot], group=group)
        return out

    def verify(result: Tensor, slot: int) -> bool:
        blocks = result.view(shape.num_ranks, shape.num_tokens, shape.row_bytes)
        wanted = (as_bytes(expected.x_of(peer, slot)) for peer in range(shape.num_ranks))
        return all(
            payload.same_bits(block[: len(want)], want)
            for block, want in zip(blocks, wanted, strict=True)
        )

    moved = _collective_volume(expected, shape.row_bytes)
    return Operation(f"{library} {ALL_GATHER}", call, verify, moved, is_rival=True)


def reduce_scatter(expected: Expected, library: str, group: dist.ProcessGroup | None) -> Operation:
    """Combine without routing: every rank adds up its experts' outputs for all tokens of all
    ranks."""
    shape = expected.workload
    tokens = torch.arange(shape.num_ranks * shape.num_tokens, device=expected.device)
    out = torch.empty(shape.num_tokens, shape.hidden, dtype=torch.bfloat16, device=expected.device)
    own = slice(expected.rank * shape.num_tokens, (expected.rank + 1) * shape.num_tokens)
    inputs: dict[int, Tensor] = {}

    def part(peer: int, keys_of: Tensor, slot: int) -> Tensor:
        # Small integers: their sum is exact in any order, which is the library's own.
        keys = payload.row_keys(peer, keys_of, slot, salt=99)
        return (payload.byte_rows(keys, shape.hidden) & 7).to(torch.bfloat16)

    def call(slot: int) -> Tensor:
        if slot not in inputs:
            inputs[slot] = part(expected.rank, tokens, slot)
        _reduce_scatter_single(out, inputs[slot], group=group)
        return out

    def verify(result: Tensor, slot: int) -> bool:
        total = torch.zeros(result.shape, device=result.device)
        for peer in range(shape.num_ranks):
            total += part(peer, tokens[own], slot).float()
        return payload.same_bits(result, total.to(torch.bfloat16))

    moved = _collective_volume(expected, shape.combine_row_bytes)
    return Operation(f"{library} {REDUCE_SCATTER}", call, verify, moved, is_rival=True)
