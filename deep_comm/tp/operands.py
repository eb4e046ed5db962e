"""What the products of ``deep_comm.tp`` are given: checked, and the method that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deep_comm import tuning
from deep_comm.errors import ArgumentError
from deep_comm.settings.checks import SCALE_BLOCK
from deep_comm.symmetric import WORDS_OF_RANK, SymmetricMemory
from deep_comm.tp.collectives import require_memory

__all__ = [
    "METHODS",
    "Method",
    "ReduceOp",
    "Rows",
    "Weight",
    "checked_operands",
    "chosen_method",
    "moved_scale",
    "multiply",
    "require",
    "require_dim",
    "scale_columns",
]

Method = Literal["auto", "unfused", "decomposed", "fused"]
METHODS = ("auto", *tuning.PRODUCT_METHODS)
ReduceOp = Literal["sum", "avg"]

_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Rows:
    """x as a matrix, and scales of FP8: one, of no dimension; or [M, 1]; or one for 128 columns,
    [M, ceil(K / 128)].
    """

    x: Tensor  # [M, K], contiguous
    scale: Tensor | None

    def part(self, rank: int, rows: int) -> Rows:
        own = slice(rank * rows, (rank + 1) * rows)
        scale = self.scale
        return Rows(self.x[own], scale if scale is None or scale.dim() == 0 else scale[own])


@dataclass(frozen=True)
class Weight:
    matrix: Tensor  # [K, N]
    scale: Tensor | None
    out_dtype: torch.dtype


def multiply(rows: Rows, weight: Weight, out: Tensor) -> None:
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
    for dim in range(scale.dim()):
        if scale.shape[dim] not in (1, values.shape[dim]):
            scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, values.shape[dim])
    return values.float() * scale.float()


def require(name: str, value: object, is_right: bool, rule: str) -> None:
    if not is_right:
        raise ArgumentError(name, value, rule)


def _require_tensor(name: str, value: Any, memory: SymmetricMemory, least_dims: int) -> None:
    require(name, type(value).__name__, isinstance(value, Tensor), "must be a tensor")
    device = f"must be on this memory's device {memory.device}"
    require(name, value.device, value.device == memory.device, device)
    dims = f"must have {least_dims} dimensions{' or more' if name == 'x' else ''}"
    is_right = value.dim() >= 2 if name == "x" else value.dim() == least_dims
    require(name, list(value.shape), is_right, dims)


def require_dim(name: str, dim: int, x: Tensor) -> None:
    rule = f"must be an integer of {-x.dim()} to {x.dim() - 1}"
    require(name, dim, isinstance(dim, int) and -x.dim() <= dim < x.dim(), rule)


def checked_operands(
    x: Tensor,
    weights: Sequence[Tensor],
    memory: SymmetricMemory,
    scales: tuple[Tensor, Tensor | Sequence[Tensor]] | None,
    out_dtype: torch.dtype | None,
    method: str,
    gathered_dim: int | None = None,
) -> tuple[Tensor | None, list[Weight]]:
    require_memory(memory)
    require("method", method, method in METHODS, f"must be one of {', '.join(METHODS)}")
    _require_tensor("x", x, memory, 2)
    allowed = _SUMMED if scales is None else _SCALED
    rule = f"must have dtype {' or '.join(map(str, allowed))}"
    rule += " (FP8 needs scales)" if scales is None else " with scales"
    require("x", x.dtype, x.dtype in allowed, rule)
    result = out_dtype or (x.dtype if scales is None else torch.bfloat16)
    wide = "must be x's dtype" if scales is None else "must be bfloat16, float16 or float32"
    fits = result == x.dtype if scales is None else result in _SUMMED
    require("out_dtype", result, fits, wide)
    x_scale: Tensor | None = None
    listed: list[Tensor | None] = [None] * len(weights)
    if scales is not None:
        rule = "must be a pair: scale of x, scale or scales of weights"
        is_pair = isinstance(scales, (tuple, list)) and len(scales) == 2
        require("scales", scales, is_pair, rule)
        x_scale, given = scales
        is_right = isinstance(given, (Tensor, tuple, list))
        require("scales", scales, is_right, rule)
        listed = [given] if isinstance(given, Tensor) else [*given]
        rule = f"must be (scale of x, {len(weights)} scales of weights)"
        require("scales", len(listed), len(listed) == len(weights), rule)
        for each in (x_scale, *listed):
            is_right = isinstance(each, Tensor) and each.device == memory.device
            require("scales", scales, is_right, f"must be tensors on {memory.device}")
            assert each is not None
            require("scales", each.dtype, each.dtype == torch.float32, "must have dtype float32")
    depth = x.shape[-1]
    if gathered_dim is not None:
        require_dim("gather_dim", gathered_dim, x)
        depth *= memory.group_size if gathered_dim % x.dim() == x.dim() - 1 else 1
    checked = []
    for weight, scale in zip(weights, listed, strict=True):
        _require_tensor("weight", weight, memory, 2)
        require(
            "weight",
            weight.dtype,
            weight.dtype == x.dtype if scales is None else weight.dtype in _SCALED,
            "must have x's dtype" if scales is None else "must be FP8, as x",
        )
        rows = f"must have {depth} rows, as many as x has columns"
        require("weight", list(weight.shape), weight.shape[0] == depth, rows)
        checked.append(Weight(weight, scale, result))
    if x_scale is not None:
        x_scale, checked = _scales_of_one_form(x, x_scale, checked)
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights))
    rule = "must not need gradients: torch.ops.deep_comm.fused_* have them"
    require("x or a weight", "requires_grad", not needs, rule)
    return x_scale, checked


def _blocks(extent: int) -> int:
    return -(-extent // SCALE_BLOCK)


def _scales_of_one_form(
    x: Tensor, x_scale: Tensor, weights: list[Weight]
) -> tuple[Tensor, list[Weight]]:
    """Scales as Rows and Weight hold them; refused unless all have the shapes of one form.

    A row's scale of an x of one row looks like one number: it is that only beside a weight's.
    """
    scales = [x_scale, *(weight.scale for weight in weights if weight.scale is not None)]
    shapes = [list(scale.shape) for scale in scales]
    matrices = [list(weight.matrix.shape) for weight in weights]
    rows = (1, [[1, columns] for _, columns in matrices])
    blocks = (_blocks(x.shape[-1]), [[_blocks(extent) for extent in each] for each in matrices])
    has_rows = x_scale.dim() >= 2 and x_scale.shape[:-1].numel() == x.shape[:-1].numel()
    if has_rows and (x_scale.shape[-1], shapes[1:]) in (rows, blocks):
        return x_scale, weights
    if any(scale.numel() != 1 for scale in scales):
        raise ArgumentError(
            "scales",
            shapes,
            "must be one number each; or one for each row of x, [..., 1], and column of a weight, "
            "[1, N]; or one for 128 columns of a row of x, [..., ceil(K / 128)], and 128 x 128 of "
            f"a weight, [ceil(K / 128), ceil(N / 128)]; x is {list(x.shape)}, weights {matrices}",
        )
    x_scale, *listed = (scale.reshape(()) for scale in scales)
    return x_scale, [
        Weight(weight.matrix, scale, weight.out_dtype)
        for weight, scale in zip(weights, listed, strict=True)
    ]


def scale_columns(scale: Tensor | None) -> int:
    """Of a row of x; 0: it has none of its own."""
    return 0 if scale is None or scale.dim() == 0 else scale.shape[-1]


def _rule_of_fused(rows: int, x: Tensor, weights: Sequence[Weight], memory: SymmetricMemory) -> str:
    """What a fused product of ``rows`` rows per rank lacks, or ""."""
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


def chosen_method(
    name: str,
    op: str,
    rows: int,
    x: Tensor,
    weights: Sequence[Weight],
    memory: SymmetricMemory,
) -> str:
    """``rows``: of a rank. The same on all ranks if depth, columns, layout and alignment are."""
    rule = _rule_of_fused(rows, x, weights, memory)
    if name == "fused":
        require("method", name, rule == "", rule)
    if name != "auto":
        return name
    columns = sum(weight.matrix.shape[1] for weight in weights)
    chosen = tuning.product_method(memory.tuned_products, op, x.dtype, (rows, x.shape[1], columns))
    if chosen is None or (chosen == "fused" and rule):
        return "unfused"
    return chosen


def moved_scale(scale: Tensor | None, x: Tensor, dim: int) -> Tensor | None:
    """Scales of rows [..., columns] in the order of the rows that are gathered."""
    if scale is None or scale.dim() == 0:
        return scale
    return scale.reshape(*x.shape[:-1], scale.shape[-1]).movedim(dim, 0).flatten(0, -2).contiguous()
