"""Matrix products that overlap with the collective before or behind them.

Three ways, ``method``:

==============  ==============================================================================
"unfused"       a collective of this package and the library's product, one after the other
"decomposed"    a product of the library per shard, while copy engines move the other shards
"fused"         one Triton product, which waits for the rows of each tile or sends them as they
                become ready; CUDA devices of sm_90
==============  ==============================================================================

"auto" takes the fastest of a product like it, as ``deep_comm bench --mode tp --store`` has measured
on this machine; where none was, "unfused". Ranks choose for themselves. So shapes, layouts and
alignments must be equal on all of them, or they get a ConfigMismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_comm.settings import integers
from deep_comm.symmetric import WORDS_OF_RANK, SymmetricMemory
from deep_comm.tp.collectives import digest_of, gather, reduce, scatter
from deep_comm.tp.exchange import Exchange
from deep_comm.tp.operands import (
    Method,
    ReduceOp,
    Rows,
    Weight,
    checked_operands,
    chosen_method,
    moved_scale,
    multiply,
    require,
    require_dim,
    scale_columns,
)

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]

_GATHERS, _SCATTERS, _REDUCES = range(3)
_CHUNK_BYTES = 16 << 20  # a push, after which the peer's product goes on


def all_gather_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    memory: SymmetricMemory,
    *,
    gather_dim: int = 0,
    return_gathered: bool = False,
    scales: tuple[Tensor, Tensor | Sequence[Tensor]] | None = None,
    out_dtype: torch.dtype | None = None,
    method: Method = "auto",
) -> tuple[Tensor | None, list[Tensor]]:
    """Every rank's x one after the other, times each weight.

    Args:
        x: [..., K] bf16, fp16 or float32, or FP8 with ``scales``; the same shape and dtype on all
            ranks.
        weights: [K, N] each, this rank's; N may differ between weights, not between ranks. A fused
            product needs each, or its transpose, contiguous.
        memory: whose ranks take part. Its ``staging_bytes`` must hold the gathered x.
        gather_dim: along which x is gathered; the same on all ranks.
        return_gathered: also return the gathered x.
        scales: of FP8, float32: of x, and one for each weight, all in one of three forms: one
            number each, that of x the same on all ranks; x's [..., 1] and [1, N], one for each row
            and each column of the product; x's [..., ceil(K / 128)] and [ceil(K / 128),
            ceil(N / 128)], one for 128 columns of a row and 128 x 128 of a weight. The same form on
            all ranks.
        out_dtype: default: x's, of FP8 bf16.
        method: see the module. The same on all ranks.

    Returns:
        The gathered x or None; the products, [..., N] with R times the extent of ``gather_dim``.

    Raises:
        ArgumentError: an argument breaks a rule; on this rank, before anything is launched.
        BufferTooSmall: ``staging_bytes`` of the memory.
        ConfigMismatch: a rank has called something else, or with an x of another shape, even one
            of as many rows, or another gather_dim. On CUDA devices a later call raises this and the
            next.
        PeerTimeout: a rank has not called it, or its rows have not come.
    """
    is_right = isinstance(weights, (Tensor, list, tuple))
    require("weights", weights, is_right, "must be a tensor or a list of them")
    listed = [weights] if isinstance(weights, Tensor) else list(weights)
    x_scale, checked = checked_operands(x, listed, memory, scales, out_dtype, method, gather_dim)
    dim = gather_dim % x.dim()
    digest = digest_of(_GATHERS, x.shape, dim, scale_columns(x_scale))
    moved = x.movedim(dim, 0).contiguous()
    if dim == x.dim() - 1:
        require("method", method, method in ("auto", "unfused"), "must not gather columns so")
        require("scales", "given", scales is None, "must be None where columns are gathered")
        gathered = gather(moved, memory, digest).movedim(0, dim).contiguous()
        whole = Rows(gathered.flatten(0, -2), None)
        outs = [_whole(whole, weight) for weight in checked]
        shaped = [out.view(*gathered.shape[:-1], out.shape[1]) for out in outs]
        return gathered if return_gathered else None, shaped
    x_scale = moved_scale(x_scale, x, dim)
    rows = Rows(moved.flatten(0, -2), x_scale)
    chosen = chosen_method(method, "all_gather_matmul", rows.x.shape[0], rows.x, checked, memory)
    flat: Tensor | None
    if chosen == "unfused":
        flat, outs = _gather_then_multiply(rows, checked, memory, digest)
    else:
        flat, outs = _gather_beside(rows, checked, memory, chosen, digest, return_gathered)
    lead = (memory.group_size * moved.shape[0], *moved.shape[1:-1])
    shaped = [out.view(*lead, out.shape[1]).movedim(0, dim) for out in outs]
    if not return_gathered:
        return None, shaped
    assert flat is not None
    return flat.view(*lead, x.shape[-1]).movedim(0, dim), shaped


def _whole(rows: Rows, weight: Weight) -> Tensor:
    out = rows.x.new_empty((rows.x.shape[0], weight.matrix.shape[1]), dtype=weight.out_dtype)
    multiply(rows, weight, out)
    return out


def _gather_scale(rows: Rows, memory: SymmetricMemory, digest: int) -> Tensor | None:
    scale = rows.scale
    return scale if scale is None or scale.dim() == 0 else gather(scale, memory, digest)


def _gather_then_multiply(
    rows: Rows, weights: Sequence[Weight], memory: SymmetricMemory, digest: int
) -> tuple[Tensor, list[Tensor]]:
    gathered = Rows(gather(rows.x, memory, digest), _gather_scale(rows, memory, digest))
    return gathered.x, [_whole(gathered, weight) for weight in weights]


def _gather_beside(
    rows: Rows,
    weights: Sequence[Weight],
    memory: SymmetricMemory,
    method: str,
    digest: int,
    return_gathered: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    exchange = Exchange.of(memory)
    rank, num_ranks, (num_rows, depth) = exchange.rank, exchange.num_ranks, rows.x.shape
    slots = exchange.staged(memory, (num_rows, depth), rows.x.dtype, "the gathered x")
    scale = _gather_scale(rows, memory, digest)
    exchange.begin(digest, method, rows.x.dtype)
    chunk_rows = _chunk_rows(num_rows, depth * rows.x.element_size())
    with exchange.beside():
        for turn in range(1, num_ranks):
            peer = (rank + turn) % num_ranks
            for chunk, first in enumerate(range(0, num_rows, chunk_rows)):
                part = rows.x[first : first + chunk_rows]
                exchange.push(part, slots, first * depth, peer, chunk)
    gathered = Rows(slots.view(num_ranks * num_rows, depth), scale)
    outs = [
        rows.x.new_empty((num_ranks * num_rows, weight.matrix.shape[1]), dtype=weight.out_dtype)
        for weight in weights
    ]
    if method == "fused":
        from deep_comm.tp.product import Gathered, product

        arriving = Gathered(gathered.x, exchange.words, chunk_rows, rank, exchange.waits())
        for weight, out in zip(weights, outs, strict=True):
            _fused(exchange, product, rows.x, weight.matrix, out, gathered=arriving)
    else:
        shards = [out.unflatten(0, (num_ranks, num_rows)) for out in outs]
        for weight, shard in zip(weights, shards, strict=True):
            multiply(rows, weight, shard[rank])
        for turn in range(1, num_ranks):
            peer = (rank - turn) % num_ranks
            for chunk in range(-(-num_rows // chunk_rows)):
                exchange.await_push(peer, chunk)
            for weight, shard in zip(weights, shards, strict=True):
                multiply(gathered.part(peer, num_rows), weight, shard[peer])
    whole = None
    if return_gathered:
        slots[rank].copy_(rows.x)
        whole = gathered.x.clone()
    exchange.end()
    return whole, outs


def _chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Multiples of a tile's rows; as many chunks as there are words at most."""
    wanted = max(_CHUNK_BYTES // max(row_bytes, 1), -(-num_rows // WORDS_OF_RANK), 1)
    return integers.round_up(wanted, 128)


def _fused(
    exchange: Exchange, product: Callable[..., None], x: Tensor, matrix: Tensor, out: Tensor,
    **peers: Any,
) -> None:  # fmt: skip
    """A Triton product on all SMs. ``peers``: how rows come from them, or go there."""
    from deep_comm.tp.product import CONFIGS

    num_sms = torch.cuda.get_device_properties(exchange.device).multi_processor_count
    with torch.cuda.device(exchange.device):
        product(x, matrix, CONFIGS[0], out=out, num_programs=num_sms, **peers)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    memory: SymmetricMemory,
    *,
    reduce_op: ReduceOp = "sum",
    scatter_dim: int = 0,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    method: Method = "auto",
) -> Tensor:
    """This rank's part of the sum of every rank's x @ weight.

    A rank's product is rounded to ``out_dtype``; these are added in float32 in rank order and
    rounded once.

    Args:
        x: [..., K] as of ``all_gather_matmul``. With "unfused" and "decomposed" K may differ
            between ranks. R divides the extent of ``scatter_dim``.
        weight: [K, N], this rank's; the same N on all ranks.
        memory: its ``staging_bytes`` must hold the product.
        reduce_op: "avg" divides the rounded sum by R and rounds again. The same on all ranks.
        scatter_dim: of the product, along which its R parts lie; the same on all ranks.
        scales, out_dtype, method: as of ``all_gather_matmul``.

    Returns:
        [..., N] with an R-th of the extent of ``scatter_dim``.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather_matmul``.
    """
    x_scale, (checked,) = checked_operands(x, [weight], memory, scales, out_dtype, method)
    require("reduce_op", reduce_op, reduce_op in ("sum", "avg"), "must be sum or avg")
    require_dim("scatter_dim", scatter_dim, x)
    dim, num_ranks = scatter_dim % x.dim(), memory.group_size
    digest = digest_of(_SCATTERS, x.shape[:-1], dim, reduce_op == "avg")
    extent = weight.shape[1] if dim == x.dim() - 1 else x.shape[dim]
    rule = f"must have an extent along scatter_dim that the {num_ranks} ranks divide"
    require("x", list(x.shape), extent % num_ranks == 0, rule)
    if dim == x.dim() - 1:
        require("method", method, method in ("auto", "unfused"), "must not scatter columns so")
        flat = Rows(x.contiguous().flatten(0, -2), moved_scale(x_scale, x, 0))
        product = _whole(flat, checked).view(*x.shape[:-1], extent)
        out = scatter(product.movedim(dim, 0).contiguous(), memory, digest).movedim(0, dim)
    else:
        moved = x.movedim(dim, 0).contiguous()
        rows = Rows(moved.flatten(0, -2), moved_scale(x_scale, x, dim))
        num_rows = rows.x.shape[0] // num_ranks
        chosen = chosen_method(method, "matmul_reduce_scatter", num_rows, rows.x, [checked], memory)
        if chosen == "unfused":
            flat_out = scatter(_whole(rows, checked), memory, digest)
        else:
            flat_out = _scatter_beside(rows, checked, memory, chosen, digest)
        lead = (moved.shape[0] // num_ranks, *moved.shape[1:-1])
        out = flat_out.view(*lead, weight.shape[1]).movedim(0, dim)
    return out.div_(num_ranks) if reduce_op == "avg" else out


def _scatter_beside(
    rows: Rows, weight: Weight, memory: SymmetricMemory, method: str, digest: int
) -> Tensor:
    exchange = Exchange.of(memory)
    rank, num_ranks = exchange.rank, exchange.num_ranks
    num_rows, columns = rows.x.shape[0] // num_ranks, weight.matrix.shape[1]
    size = num_rows * columns
    padded = integers.round_up(size * weight.out_dtype.itemsize, 16) // weight.out_dtype.itemsize
    slots = exchange.staged(memory, (padded,), weight.out_dtype, "the product")
    exchange.begin(digest, method, columns, weight.out_dtype)
    out = rows.x.new_empty((num_rows, columns), dtype=weight.out_dtype)
    if method == "fused":
        from deep_comm.tp.product import Scattered, scattered_product

        leaving = Scattered(
            exchange.bases, exchange.slot_offset(slots), slots, exchange.words_offset,
            exchange.words, exchange.counters, rank, exchange.waits(),
        )  # fmt: skip
        _fused(exchange, scattered_product, rows.x, weight.matrix, out, scattered=leaving)
    else:
        parts = rows.x.new_empty((num_ranks, num_rows, columns), dtype=weight.out_dtype)
        for turn in range(1, num_ranks):
            peer = (rank + turn) % num_ranks
            multiply(rows.part(peer, num_rows), weight, parts[peer])
            with exchange.beside():
                exchange.push(parts[peer], slots, 0, peer)
        own = slots[rank, :size].view(num_rows, columns)
        multiply(rows.part(rank, num_rows), weight, own)
        exchange.add_slots(slots, out)
    exchange.end()
    return out


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    memory: SymmetricMemory,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    method: Method = "auto",
) -> Tensor:
    """The sum of every rank's x @ weight: ``matmul_reduce_scatter``, then ``all_gather``.

    Unfused, and where the ranks do not divide the rows, it is a product and ``all_reduce``.

    Args:
        x: [..., K]; weight, memory, scales, out_dtype, method: as of ``matmul_reduce_scatter``, but
            unfused ``staging_bytes`` must hold the product twice.

    Returns:
        [..., N], the same bits by every method and on every rank.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather_matmul``.
    """
    x_scale, (checked,) = checked_operands(x, [weight], memory, scales, out_dtype, method)
    digest = digest_of(_REDUCES, x.shape[:-1])
    rows = Rows(x.contiguous().flatten(0, -2), moved_scale(x_scale, x, 0))
    num_rows, rest = divmod(rows.x.shape[0], memory.group_size)
    if rest:
        require("method", method, method in ("auto", "unfused"), "must divide the rows of x")
        chosen = "unfused"
    else:
        chosen = chosen_method(method, "matmul_all_reduce", num_rows, rows.x, [checked], memory)
    if chosen == "unfused":
        out = reduce(_whole(rows, checked), memory, digest)
    else:
        out = gather(_scatter_beside(rows, checked, memory, chosen, digest), memory, digest)
    return out.view(*x.shape[:-1], weight.shape[1])
