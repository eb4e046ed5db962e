"""Checks of what callers pass, each naming the argument, the value and the rule."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError

if TYPE_CHECKING:
    from deep_comm.backends import Launch

MAX_TOPK = 64
ROW_ALIGNMENT = 16
SCALE_BLOCK = 128  # columns of a row that share a scale when the engine quantises
TOPK_IDX_DTYPES = (torch.int64, torch.int32)
COMBINE_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def _names(values: Sequence[Any]) -> str:
    return " or ".join(str(value) for value in values)


def tensor(
    name: str,
    value: Any,
    device: torch.device,
    *,
    shape: Sequence[int | None],
    dtypes: Container[torch.dtype] | None = None,
    contiguous: bool = True,
) -> Tensor:
    """``value`` if it is a tensor of this shape (None: any extent), dtype and device."""
    if (
        isinstance(value, Tensor)
        and value.device == device
        and (dtypes is None or value.dtype in dtypes)
        and (not contiguous or value.is_contiguous())
    ):
        extents = value.shape
        if len(extents) == len(shape):
            for extent, wanted in zip(extents, shape, strict=True):
                if wanted is not None and extent != wanted:
                    break
            else:
                return value
    raise _refusal(name, value, device, shape, dtypes)


def matrix(name: str, value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """tensor() for a contiguous matrix of one dtype, in less time."""
    if (
        isinstance(value, Tensor)
        and value.dtype == dtype
        and value.dim() == 2
        and value.device == device
        and value.is_contiguous()
    ):
        return value
    return tensor(name, value, device, shape=(None, None), dtypes=(dtype,))


def _refusal(
    name: str,
    value: Any,
    device: torch.device,
    shape: Sequence[int | None],
    dtypes: Container[torch.dtype] | None,
) -> ArgumentError:
    """Which rule of tensor() ``value`` breaks; the first of several."""
    if not isinstance(value, Tensor):
        return ArgumentError(name, type(value).__name__, "must be a tensor")
    if value.device != device:
        return ArgumentError(name, value.device, f"must be on this Buffer's device {device}")
    if dtypes is not None and value.dtype not in dtypes:
        assert isinstance(dtypes, Iterable)
        return ArgumentError(name, value.dtype, f"must have dtype {_names(tuple(dtypes))}")
    fits = value.dim() == len(shape) and all(
        wanted is None or extent == wanted
        for extent, wanted in zip(value.shape, shape, strict=True)
    )
    if not fits:
        wanted_shape = ["any" if extent is None else extent for extent in shape]
        rule = f"must have shape [{', '.join(map(str, wanted_shape))}]"
        return ArgumentError(name, list(value.shape), rule)
    return ArgumentError(name, f"strides {value.stride()}", "must be contiguous")


class Payload:
    """x and its scales, as the engine takes them."""

    __slots__ = (
        "x",
        "scales",
        "num_tokens",
        "hidden",
        "row_bytes",
        "num_scales",
        "scale_bytes",
        "scale_row_bytes",
    )

    def __init__(self, x: Tensor, scales: Tensor | None) -> None:
        self.x = x  # [T, H]
        self.scales = scales  # [T, S], any strides
        self.num_tokens, self.hidden = x.shape
        self.row_bytes = self.hidden * x.element_size()
        self.num_scales = self.scale_bytes = self.scale_row_bytes = 0
        if scales is not None:
            self.num_scales = scales.shape[1]
            self.scale_bytes = scales.element_size()
            self.scale_row_bytes = self.num_scales * self.scale_bytes


class QuantisedPayload(Payload):
    """bfloat16 rows that the engine casts to FP8 on their way: e4m3, a scale for 128 columns.

    ``x`` and ``scales`` are its scratch, which ring mode sends from; ``allocate`` makes them.
    """

    __slots__ = ("source", "round_scale", "use_ue8m0")

    def __init__(self, source: Tensor, round_scale: bool, use_ue8m0: bool) -> None:
        self.source = source  # [T, H]
        self.round_scale = round_scale
        self.use_ue8m0 = use_ue8m0
        self.num_tokens, self.hidden = source.shape
        self.row_bytes = self.hidden
        num_blocks = self.hidden // SCALE_BLOCK
        self.num_scales = -(-num_blocks // 4) if use_ue8m0 else num_blocks
        self.scale_bytes = 4
        self.scale_row_bytes = 4 * self.num_scales

    def allocate(self, launch: Launch) -> None:
        self.x = launch.empty((self.num_tokens, self.hidden), torch.float8_e4m3fn)
        scale_dtype = torch.int32 if self.use_ue8m0 else torch.float32
        self.scales = launch.empty((self.num_tokens, self.num_scales), scale_dtype)


def _row(name: str, x: Tensor) -> None:
    row_bytes = x.shape[1] * x.element_size()
    if row_bytes == 0 or row_bytes % ROW_ALIGNMENT != 0:
        raise ArgumentError(
            name,
            f"rows of {row_bytes} bytes",
            f"must have rows of a positive multiple of {ROW_ALIGNMENT} bytes",
        )
    if x.data_ptr() % ROW_ALIGNMENT != 0:
        raise ArgumentError(
            name, f"address {x.data_ptr():#x}", f"must start at a multiple of {ROW_ALIGNMENT} bytes"
        )


def payload(x: Any, device: torch.device) -> Payload:
    """dispatch's x: a tensor, or a pair of a tensor and its scales."""
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ArgumentError("x", f"{len(x)} items", "must be a tensor or (tensor, scales)")
        x, scales = x
    x = tensor("x", x, device, shape=(None, None))
    _row("x", x)
    if scales is not None:
        scales = tensor("x_scales", scales, device, shape=(x.shape[0], None), contiguous=False)
        if scales.element_size() not in (1, 2, 4, 8):
            raise ArgumentError(
                "x_scales", scales.dtype, "must have elements of 1, 2, 4 or 8 bytes"
            )
        if scales.shape[1] == 0:
            raise ArgumentError("x_scales", list(scales.shape), "must have at least one column")
    return Payload(x, scales)


def quantised_payload(
    x: Any, device: torch.device, round_scale: bool, use_ue8m0: bool
) -> QuantisedPayload:
    """dispatch's x with use_fp8."""
    if isinstance(x, (tuple, list)):
        raise ArgumentError("x", f"{len(x)} items", "must be a tensor without scales with use_fp8")
    x = tensor("x", x, device, shape=(None, None), dtypes=(torch.bfloat16,))
    if x.shape[1] == 0 or x.shape[1] % SCALE_BLOCK != 0:
        rule = f"must have a positive multiple of {SCALE_BLOCK} columns with use_fp8"
        raise ArgumentError("x", list(x.shape), rule)
    _row("x", x)
    return QuantisedPayload(x, round_scale, use_ue8m0)


def combine_input(x: Any, device: torch.device) -> Tensor:
    x = tensor("x", x, device, shape=(None, None), dtypes=COMBINE_DTYPES)
    _row("x", x)
    return x


def topk_idx(value: Any, device: torch.device, num_tokens: int | None = None) -> Tensor:
    value = tensor("topk_idx", value, device, shape=(num_tokens, None), dtypes=TOPK_IDX_DTYPES)
    if not 1 <= value.shape[1] <= MAX_TOPK:
        raise ArgumentError("topk_idx", list(value.shape), f"must have 1 to {MAX_TOPK} columns")
    return value


def topk_pair(
    idx: Any, weights: Any, device: torch.device, num_tokens: int
) -> tuple[Tensor | None, Tensor | None]:
    """topk_idx with or without weights; weights alone say nothing."""
    if idx is None:
        if weights is not None:
            raise ArgumentError("topk_weights", None, "must come with topk_idx")
        return None, None
    if not (
        isinstance(idx, Tensor)
        and (idx.dtype == torch.int64 or idx.dtype == torch.int32)
        and idx.dim() == 2
        and idx.device == device
        and idx.shape[0] == num_tokens
        and 1 <= idx.shape[1] <= MAX_TOPK
        and idx.is_contiguous()
    ):
        idx = topk_idx(idx, device, num_tokens)
    if weights is not None:
        weights = matrix("topk_weights", weights, device, torch.float32)
        if weights.shape != idx.shape:
            tensor("topk_weights", weights, device, shape=idx.shape)
    return idx, weights


def biases(bias: Any, shape: Sequence[int], like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """combine's bias: nothing, a tensor, or a pair."""
    if bias is None:
        return None, None
    parts = bias if isinstance(bias, (tuple, list)) else (bias, None)
    if len(parts) != 2:
        raise ArgumentError("bias", f"{len(parts)} items", "must be a tensor or a pair of tensors")
    for position, part in enumerate(parts):
        if part is not None:
            name = f"bias[{position}]" if isinstance(bias, (tuple, list)) else "bias"
            tensor(name, part, like.device, shape=shape, dtypes=(like.dtype,))
    return parts[0], parts[1]


def num_experts(value: Any, num_max_experts: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= num_max_experts:
        raise ArgumentError(
            "num_experts", value, f"must be 1 to {num_max_experts} (num_max_experts of the Buffer)"
        )
    return value
