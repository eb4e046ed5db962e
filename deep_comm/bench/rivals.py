"""The same job by torch.distributed: NCCL on GPUs, gloo on the host. Checked like everything
else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_comm.bench.expected import Expected, Payload
from deep_comm.bench.measure import nccl_group
from deep_comm.bench.operations import Operation
from deep_comm.bench.payload import integers, row_bytes, same_bits
from deep_comm.bench.workload import Volume, mean_volume

ALL_TO_ALL = "all_to_all_single"

# The names of newer versions of torch, which warn about the older ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Collective = Callable[[Tensor, Tensor], object]
"""(output, input)."""


def as_bytes(rows: Payload) -> Tensor:
    """uint8 [n, row bytes]: a row, then its scales."""
    parts = rows if isinstance(rows, tuple) else (rows,)
    return torch.cat([row_bytes(part) for part in parts], dim=1)


def operations(expected: Expected) -> Iterator[Operation]:
    """all_to_all_single of rows already sorted and counted, and the collectives that need neither.

    In low-latency mode the latter alone, and both in turn.
    """
    is_nccl, shape, rank = expected.device.type == "cuda", expected.workload, expected.rank
    library, group = ("NCCL", nccl_group()) if is_nccl else ("gloo", dist.group.WORLD)
    inputs, ranks, device = range(expected.num_inputs), range(shape.num_ranks), expected.device

    def operation(
        name: str, volume: Volume, collective: Collective, out: Tensor, xs: list[Tensor],
        is_right: Callable[[Tensor, int], bool],
    ) -> Operation:  # fmt: skip
        def call(input_idx: int) -> Tensor:
            collective(out, xs[input_idx])
            return out

        return Operation(f"{library} {name}", call, is_right, volume, is_rival=True)

    def sent(input_idx: int) -> Tensor:
        return torch.cat([as_bytes(expected.sent(peer, input_idx)) for peer in ranks])

    if not expected.low_latency:
        rows = expected.plan(0).rows_between()
        sizes = [sent[rank] for sent in rows], rows[rank]  # received, sent
        mask = expected.plan(0).dispatched[rank].is_token_in_rank.to(device)
        order = torch.cat([mask[:, peer].nonzero().squeeze(1) for peer in ranks])
        yield operation(
            ALL_TO_ALL, mean_volume(shape, shape.row_bytes, 4),
            lambda out, x: dist.all_to_all_single(out, x, *sizes, group=group),
            torch.empty(sum(sizes[0]), shape.row_bytes, dtype=torch.uint8, device=device),
            [as_bytes(expected.x[idx])[order] for idx in inputs],
            lambda out, idx: same_bits(out, sent(idx)[expected.rows(0).origin]),
        )  # fmt: skip

    def whole(num_bytes: int) -> Volume:
        """Rows of so many bytes of every rank, to or from every rank."""
        block = shape.num_tokens * num_bytes
        return Volume(shape.num_ranks * block, (shape.num_ranks - 1) * block)

    def gathered_right(out: Tensor, input_idx: int) -> bool:
        blocks = zip(out.chunk(shape.num_ranks), ranks, strict=True)
        wanted = ((block, as_bytes(expected.sent(peer, input_idx))) for block, peer in blocks)
        return all(same_bits(block[: len(want)], want) for block, want in wanted)

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, 0, 0, shape.num_tokens - len(rows)))

    # Dispatch without routing: every rank gets all tokens. A rank with fewer sends padding.
    num_all = shape.num_ranks * shape.num_tokens
    there = operation(
        "all_gather", whole(shape.row_bytes), lambda out, x: _all_gather(out, x, group=group),
        torch.empty(num_all, shape.row_bytes, dtype=torch.uint8, device=device),
        [padded(as_bytes(expected.sent(rank, idx))) for idx in inputs], gathered_right,
    )  # fmt: skip
    yield there

    def outputs(peer: int, input_idx: int) -> Tensor:
        """Of a rank's experts for all tokens of all ranks: small integers, whose sum is exact in
        any order, which is the library's own."""
        seed, sizes = 100 * input_idx + peer, (num_all, shape.hidden)
        return integers(0, 8, sizes, seed, device, torch.uint8).to(torch.bfloat16)

    def reduced_right(out: Tensor, input_idx: int) -> bool:
        own = slice(rank * shape.num_tokens, (rank + 1) * shape.num_tokens)
        total = torch.zeros(out.shape, device=device)
        for peer in ranks:
            total += outputs(peer, input_idx)[own]
        return same_bits(out, total.to(torch.bfloat16))

    # Combine without routing: every rank adds up its experts' outputs for all tokens.
    back = operation(
        "reduce_scatter", whole(shape.combine_row_bytes),
        lambda out, x: _reduce_scatter(out, x, group=group),
        torch.empty(shape.num_tokens, shape.hidden, dtype=torch.bfloat16, device=device),
        [outputs(rank, idx) for idx in inputs], reduced_right,
    )  # fmt: skip
    yield back
    if expected.low_latency:

        def pair(input_idx: int) -> Any:
            return there.call(input_idx), back.call(input_idx)

        def pair_right(result: Any, input_idx: int) -> bool:
            return there.is_right(result[0], input_idx) and back.is_right(result[1], input_idx)

        moved = whole(shape.row_bytes) + whole(shape.combine_row_bytes)
        yield Operation(f"{there.name} + reduce_scatter", pair, pair_right, moved, is_rival=True)
