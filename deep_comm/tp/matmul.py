"""Matrix products that overlap with the collective before or behind them.

Three ways, ``method``:

==============  ==============================================================================
"unfused"       a collective of this package and the library's product, one after the other
"decomposed"    a product of the library per shard, while copy engines move the other shards
"fused"         one Triton product, which waits for the rows of each tile or sends them as they
                become ready; CUDA devices of sm_90
==============  ==============================================================================

"auto" takes the fastest of a product like it, as ``deep_comm bench --mode tp --store`` has measured
on this machine; where none was, "unfused".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deep_comm import tuning
from deep_comm.errors import ArgumentError
from deep_comm.symmetric import WORDS_OF_RANK, SymmetricMemory
from deep_comm.tp.collectives import all_gather, all_reduce, reduce_scatter, require_memory
from deep_comm.tp.exchange import Exchange

__all__ = [
    "Method",
    "ReduceOp",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

Method = Literal["auto", "unfused", "decomposed", "fused"]
METHODS = ("auto", "unfused", "decomposed", "fused")
ReduceOp = Literal["sum", "avg"]

_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
_CHUNK_BYTES = 16 << 20  # a push, after which the peer's product goes on


@dataclass(frozen=True)
class _Rows:
    """x as a matrix, and the scales of FP8: one, or one for each row, or for 128 columns of it."""

    x: Tensor  # [M, K], contiguous
    scale: Tensor | None

    def part(self, rank: int, rows: int) -> _Rows:
        own = slice(rank * rows, (rank + 1) * rows)
        scale = self.scale
        return _Rows(self.x[own], scale if scale is None or scale.numel() == 1 else scale[own])


@dataclass(frozen=True)
class _Weight:
    matrix: Tensor  # [K, N]
    scale: Tensor | None
    out_dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of a product's row."""
        return self.matrix.shape[1] * self.out_dtype.itemsize


def _multiply(rows: _Rows, weight: _Weight, out: Tensor) -> None:
    if rows.scale is None or weight.scale is None:
        torch.mm(rows.x, weight.matrix, out=out)
    elif rows.x.is_cuda:
        torch._scaled_mm(
            rows.x,
            weight.matrix,
            scale_a=rows.scale,
            scale_b=weight.scale,
            out_dtype=out.dtype,
            out=out,
        )
    else:
        x, matrix = _wide(rows.x, rows.scale), _wide(weight.matrix, weight.scale)
        out.copy_(x @ matrix)


def _wide(values: Tensor, scale: Tensor) -> Tensor:
    """In float32, where the library multiplies no FP8."""
    for dim in range(values.dim()):
        if scale.numel() > 1 and scale.shape[dim] not in (1, values.shape[dim]):
            repeats = -(-values.shape[dim] // scale.shape[dim])
            scale = scale.repeat_interleave(repeats, dim)
            scale = scale.narrow(dim, 0, values.shape[dim])
    return values.float() * scale.float()


def _require(name: str, value: object, is_right: bool, rule: str) -> None:
    if not is_right:
        raise ArgumentError(name, value, rule)


def _require_tensor(name: str, value: Any, memory: SymmetricMemory, least_dims: int) -> None:
    _require(name, type(value).__name__, isinstance(value, Tensor), "must be a tensor")
    device = f"must be on this memory's device {memory.device}"
    _require(name, value.device, value.device == memory.device, device)
    dims = f"must have {least_dims} dimensions{' or more' if name == 'x' else ''}"
    is_right = value.dim() >= 2 if name == "x" else value.dim() == least_dims
    _require(name, list(value.shape), is_right, dims)


def _require_dim(name: str, dim: int, x: Tensor) -> None:
    rule = f"must be an integer of {-x.dim()} to {x.dim() - 1}"
    _require(name, dim, -x.dim() <= dim < x.dim(), rule)


def _checked(
    x: Tensor,
    weights: Sequence[Tensor],
    memory: SymmetricMemory,
    scales: tuple[Tensor, Tensor | Sequence[Tensor]] | None,
    out_dtype: torch.dtype | None,
    method: str,
    gathered_dim: int | None = None,
) -> tuple[Tensor | None, list[_Weight]]:
    require_memory(memory)
    _require("method", method, method in METHODS, f"must be one of {', '.join(METHODS)}")
    _require_tensor("x", x, memory, 2)
    allowed = _SUMMED if scales is None else _SCALED
    rule = f"must have dtype {' or '.join(map(str, allowed))}"
    rule += " (FP8 needs scales)" if scales is None else " with scales"
    _require("x", x.dtype, x.dtype in allowed, rule)
    result = out_dtype or (x.dtype if scales is None else torch.bfloat16)
    wide = "must be x's dtype" if scales is None else "must be bfloat16, float16 or float32"
    fits = result == x.dtype if scales is None else result in _SUMMED
    _require("out_dtype", result, fits, wide)
    x_scale: Tensor | None = None
    listed: list[Tensor | None] = [None] * len(weights)
    if scales is not None:
        x_scale, given = scales
        listed = [given] if isinstance(given, Tensor) else [*given]
        rule = f"must be (scale of x, {len(weights)} scales of weights)"
        _require("scales", len(listed), len(listed) == len(weights), rule)
    depth = x.shape[-1]
    if gathered_dim is not None:
        _require_dim("gather_dim", gathered_dim, x)
        depth *= memory.group_size if gathered_dim % x.dim() == x.dim() - 1 else 1
    checked = []
    for weight, scale in zip(weights, listed, strict=True):
        _require_tensor("weight", weight, memory, 2)
        _require(
            "weight",
            weight.dtype,
            weight.dtype == x.dtype if scales is None else weight.dtype in _SCALED,
            "must have x's dtype",
        )
        rows = f"must have {depth} rows, as many as x has columns"
        _require("weight", list(weight.shape), weight.shape[0] == depth, rows)
        checked.append(_Weight(weight, scale, result))
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights))
    rule = "must not need gradients: torch.ops.deep_comm.fused_* have them"
    _require("x or a weight", "requires_grad", not needs, rule)
    return x_scale, checked


def _rule_of_fused(
    rows: int, x: Tensor, weights: Sequence[_Weight], memory: SymmetricMemory
) -> str:
    """What a fused product of ``rows`` rows a rank lacks, or ""."""
    if memory.device.type != "cuda" or torch.cuda.get_device_capability(memory.device) != (9, 0):
        return "must not be fused except on GPUs of sm_90"
    try:
        from deep_comm.tp import product  # noqa: F401
    except ImportError:
        return "must not be fused without Triton 3.6"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "must not be fused except for bf16 and fp16"
    if rows == 0 or rows % 128 != 0 or rows > 128 * 8 * WORDS_OF_RANK:
        most = 128 * 8 * WORDS_OF_RANK
        return f"must not be fused unless each rank has a multiple of 128 rows, at most {most}"
    for weight in weights:
        matrix = weight.matrix
        if not (matrix.is_contiguous() or matrix.t().is_contiguous()):
            return "must not be fused unless a weight or its transpose is contiguous"
        if any(extent % 8 != 0 or extent == 0 for extent in matrix.shape):
            return "must not be fused unless extents of weights are multiples of 8"
        if (matrix.data_ptr() | x.data_ptr()) % 16 != 0:
            return "must not be fused unless tensors begin at multiples of 16 bytes"
    return ""


def _method(
    name: str,
    op: str,
    rows: int,
    x: Tensor,
    weights: Sequence[_Weight],
    memory: SymmetricMemory,
    row_bytes: int,
) -> str:
    """``rows``: of a rank; ``row_bytes``: of one that is staged unless the product is unfused. The
    same on all ranks, which all follow from the same arguments.
    """
    rule = _rule_of_fused(rows, x, weights, memory)
    if name == "fused":
        _require("method", name, rule == "", rule)
    if name != "auto":
        return name
    columns = sum(weight.matrix.shape[1] for weight in weights)
    chosen = tuning.product_method(memory.tuned_products, op, x.dtype, (rows, x.shape[1], columns))
    has_room = memory.group_size * rows * row_bytes <= 2 * memory.staging_bytes
    if chosen is None or not has_room or (chosen == "fused" and rule):
        return "unfused"
    return chosen


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
        memory: whose ranks take part. Its 2 * ``staging_bytes`` must hold the gathered x.
        gather_dim: along which x is gathered.
        return_gathered: also return the gathered x.
        scales: of FP8, float32: of x, and one for each weight, in the forms of
            ``torch._scaled_mm``: one number, one for each row of x and column of a weight, or one
            for 128 columns of a row and 128 x 128 of a weight.
        out_dtype: default: x's, of FP8 bf16.
        method: see the module. The same on all ranks.

    Returns:
        The gathered x or None; the products, [..., N] with R times the extent of ``gather_dim``.

    Raises:
        ArgumentError: an argument breaks a rule; on this rank, before anything is launched.
        BufferTooSmall: ``staging_bytes`` of the memory.
        ConfigMismatch: a rank has called something else. On CUDA devices a later call raises this
            and the next.
        PeerTimeout: a rank has not called it, or its rows have not come.
    """
    listed = [weights] if isinstance(weights, Tensor) else list(weights)
    x_scale, checked = _checked(x, listed, memory, scales, out_dtype, method, gather_dim)
    dim = gather_dim % x.dim()
    moved = x.movedim(dim, 0).contiguous()
    if dim == x.dim() - 1:
        _require("method", method, method in ("auto", "unfused"), "must not gather columns so")
        _require("scales", "given", scales is None, "must be None where columns are gathered")
        gathered = all_gather(moved, memory).movedim(0, dim).contiguous()
        whole = _Rows(gathered.flatten(0, -2), None)
        outs = [_whole(whole, weight) for weight in checked]
        shaped = [out.view(*gathered.shape[:-1], out.shape[1]) for out in outs]
        return gathered if return_gathered else None, shaped
    x_scale = _moved_scale(x_scale, x, dim)
    rows = _Rows(moved.flatten(0, -2), x_scale)
    row_bytes = x.shape[-1] * x.element_size()
    chosen = _method(
        method, "all_gather_matmul", rows.x.shape[0], rows.x, checked, memory, row_bytes
    )
    flat: Tensor | None
    if chosen == "unfused":
        flat, outs = _gather_then_multiply(rows, checked, memory)
    else:
        flat, outs = _gather_beside(rows, checked, memory, chosen, return_gathered)
    lead = (memory.group_size * moved.shape[0], *moved.shape[1:-1])
    shaped = [out.view(*lead, out.shape[1]).movedim(0, dim) for out in outs]
    if not return_gathered:
        return None, shaped
    assert flat is not None
    return flat.view(*lead, x.shape[-1]).movedim(0, dim), shaped


def _moved_scale(scale: Tensor | None, x: Tensor, dim: int) -> Tensor | None:
    """Scales of rows [..., columns] in the order of the rows that are gathered."""
    if scale is None or scale.numel() == 1:
        return scale
    rule = "must have one number, or a row of them for each row of x"
    is_right = scale.dim() >= 2 and scale.flatten(0, -2).shape[0] == x.flatten(0, -2).shape[0]
    _require("scales", list(scale.shape), is_right, rule)
    return scale.view(*x.shape[:-1], scale.shape[-1]).movedim(dim, 0).flatten(0, -2).contiguous()


def _whole(rows: _Rows, weight: _Weight) -> Tensor:
    out = rows.x.new_empty((rows.x.shape[0], weight.matrix.shape[1]), dtype=weight.out_dtype)
    _multiply(rows, weight, out)
    return out


def _gather_scale(rows: _Rows, memory: SymmetricMemory) -> Tensor | None:
    scale = rows.scale
    return scale if scale is None or scale.numel() == 1 else all_gather(scale, memory)


def _gather_then_multiply(
    rows: _Rows, weights: Sequence[_Weight], memory: SymmetricMemory
) -> tuple[Tensor, list[Tensor]]:
    gathered = _Rows(all_gather(rows.x, memory), _gather_scale(rows, memory))
    return gathered.x, [_whole(gathered, weight) for weight in weights]


def _gather_beside(
    rows: _Rows,
    weights: Sequence[_Weight],
    memory: SymmetricMemory,
    method: str,
    return_gathered: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    exchange = Exchange.of(memory)
    rank, num_ranks, (num_rows, depth) = exchange.rank, exchange.num_ranks, rows.x.shape
    slots = exchange.staged(memory, (num_rows, depth), rows.x.dtype, "the gathered x")
    scale = _gather_scale(rows, memory)
    exchange.begin("all_gather_matmul", method, num_rows, depth, rows.x.dtype, memory.staging_bytes)
    chunk_rows = _chunk_rows(num_rows, depth * rows.x.element_size())
    with exchange.beside():
        for turn in range(1, num_ranks):
            peer = (rank + turn) % num_ranks
            for chunk, first in enumerate(range(0, num_rows, chunk_rows)):
                part = rows.x[first : first + chunk_rows]
                exchange.push(part, slots, first * depth, peer, chunk)
    gathered = _Rows(slots.view(num_ranks * num_rows, depth), scale)
    outs = [
        rows.x.new_empty((num_ranks * num_rows, weight.matrix.shape[1]), dtype=weight.out_dtype)
        for weight in weights
    ]
    if method == "fused":
        for weight, out in zip(weights, outs, strict=True):
            _fused_product(rows.x, weight.matrix, out, exchange, gathered.x, chunk_rows)
    else:
        shards = [out.unflatten(0, (num_ranks, num_rows)) for out in outs]
        for weight, shard in zip(weights, shards, strict=True):
            _multiply(rows, weight, shard[rank])
        for turn in range(1, num_ranks):
            peer = (rank - turn) % num_ranks
            for chunk in range(-(-num_rows // chunk_rows)):
                exchange.await_push(peer, chunk)
            for weight, shard in zip(weights, shards, strict=True):
                _multiply(gathered.part(peer, num_rows), weight, shard[peer])
    whole = None
    if return_gathered:
        slots[rank].copy_(rows.x)
        whole = gathered.x.clone()
    exchange.end()
    return whole, outs


def _chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Multiples of a tile's rows; as many chunks as there are words at most."""
    wanted = max(_CHUNK_BYTES // max(row_bytes, 1), -(-num_rows // WORDS_OF_RANK), 1)
    return -(-wanted // 128) * 128


def _waits(exchange: Exchange) -> Any:
    from deep_comm.tp import product

    return product.Waits(exchange.sequence, exchange.fault, int(exchange.timeout_s * 1e9))


def _num_programs(exchange: Exchange) -> int:
    return torch.cuda.get_device_properties(exchange.device).multi_processor_count


def _fused_product(
    x: Tensor, matrix: Tensor, out: Tensor, exchange: Exchange, gathered: Tensor, chunk_rows: int
) -> None:
    from deep_comm.tp import product

    arriving = product.Gathered(
        rows=gathered,
        words=exchange.words,
        chunk_rows=chunk_rows,
        rank=exchange.rank,
        waits=_waits(exchange),
    )
    with torch.cuda.device(exchange.device):
        product.product(
            x,
            matrix,
            product.CONFIGS[0],
            out=out,
            num_programs=_num_programs(exchange),
            gathered=arriving,
        )


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
        x: [..., K] as of ``all_gather_matmul``. R divides the extent of ``scatter_dim``.
        weight: [K, N], this rank's.
        memory: its 2 * ``staging_bytes`` must hold the product; ``staging_bytes`` if unfused.
        reduce_op: "avg" divides the rounded sum by R and rounds again.
        scatter_dim: of the product, along which its R parts lie.
        scales, out_dtype, method: as of ``all_gather_matmul``.

    Returns:
        [..., N] with an R-th of the extent of ``scatter_dim``.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather_matmul``.
    """
    x_scale, (checked,) = _checked(x, [weight], memory, scales, out_dtype, method)
    _require("reduce_op", reduce_op, reduce_op in ("sum", "avg"), "must be sum or avg")
    _require_dim("scatter_dim", scatter_dim, x)
    dim, num_ranks = scatter_dim % x.dim(), memory.group_size
    extent = weight.shape[1] if dim == x.dim() - 1 else x.shape[dim]
    rule = f"must have an extent along scatter_dim that the {num_ranks} ranks divide"
    _require("x", list(x.shape), extent % num_ranks == 0, rule)
    if dim == x.dim() - 1:
        _require("method", method, method in ("auto", "unfused"), "must not scatter columns so")
        flat = _Rows(x.contiguous().flatten(0, -2), _moved_scale(x_scale, x, 0))
        product = _whole(flat, checked).view(*x.shape[:-1], extent)
        out = reduce_scatter(product.movedim(dim, 0).contiguous(), memory).movedim(0, dim)
    else:
        moved = x.movedim(dim, 0).contiguous()
        rows = _Rows(moved.flatten(0, -2), _moved_scale(x_scale, x, dim))
        num_rows = rows.x.shape[0] // num_ranks
        chosen = _method(
            method, "matmul_reduce_scatter", num_rows, rows.x, [checked], memory, checked.row_bytes
        )
        if chosen == "unfused":
            flat_out = reduce_scatter(_whole(rows, checked), memory)
        else:
            flat_out = _scatter_beside(rows, checked, memory, chosen)
        lead = (moved.shape[0] // num_ranks, *moved.shape[1:-1])
        out = flat_out.view(*lead, weight.shape[1]).movedim(0, dim)
    return out.div_(num_ranks) if reduce_op == "avg" else out


def _scatter_beside(rows: _Rows, weight: _Weight, memory: SymmetricMemory, method: str) -> Tensor:
    exchange = Exchange.of(memory)
    rank, num_ranks = exchange.rank, exchange.num_ranks
    num_rows, columns = rows.x.shape[0] // num_ranks, weight.matrix.shape[1]
    size = num_rows * columns
    padded = -(-size * weight.out_dtype.itemsize // 16) * 16 // weight.out_dtype.itemsize
    slots = exchange.staged(memory, (padded,), weight.out_dtype, "the product")
    exchange.begin(
        "matmul_reduce_scatter", method, num_rows, columns, weight.out_dtype, memory.staging_bytes
    )
    out = rows.x.new_empty((num_rows, columns), dtype=weight.out_dtype)
    if method == "fused":
        _fused_scatter(rows.x, weight.matrix, out, exchange, slots)
    else:
        parts = rows.x.new_empty((num_ranks, num_rows, columns), dtype=weight.out_dtype)
        for turn in range(1, num_ranks):
            peer = (rank + turn) % num_ranks
            _multiply(rows.part(peer, num_rows), weight, parts[peer])
            with exchange.beside():
                exchange.push(parts[peer], slots, 0, peer)
        own = slots[rank, :size].view(num_rows, columns)
        _multiply(rows.part(rank, num_rows), weight, own)
        exchange.add_slots(slots, out)
    exchange.end()
    return out


def _fused_scatter(
    x: Tensor, matrix: Tensor, out: Tensor, exchange: Exchange, slots: Tensor
) -> None:
    from deep_comm.tp import product

    scattered = product.Scattered(
        bases=exchange.bases,
        slot_offset=exchange.slot_offset(slots),
        own_slots=slots,
        words_offset=exchange.words_offset,
        own_words=exchange.words,
        counters=exchange.counters,
        rank=exchange.rank,
        waits=_waits(exchange),
    )
    with torch.cuda.device(exchange.device):
        product.scattered_product(
            x,
            matrix,
            product.CONFIGS[0],
            out=out,
            num_programs=_num_programs(exchange),
            scattered=scattered,
        )


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
        x: [..., K]; weight, memory, scales, out_dtype, method: as of ``matmul_reduce_scatter``.

    Returns:
        [..., N], the same bits by every method and on every rank.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather_matmul``.
    """
    x_scale, (checked,) = _checked(x, [weight], memory, scales, out_dtype, method)
    rows = _Rows(x.contiguous().flatten(0, -2), _moved_scale(x_scale, x, 0))
    num_rows, rest = divmod(rows.x.shape[0], memory.group_size)
    if rest:
        _require("method", method, method in ("auto", "unfused"), "must divide the rows of x")
        chosen = "unfused"
    else:
        chosen = _method(
            method, "matmul_all_reduce", num_rows, rows.x, [checked], memory, checked.row_bytes
        )
    if chosen == "unfused":
        out = all_reduce(_whole(rows, checked), memory)
    else:
        out = all_gather(_scatter_beside(rows, checked, memory, chosen), memory)
    return out.view(*x.shape[:-1], weight.shape[1])
