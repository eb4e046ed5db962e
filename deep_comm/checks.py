"""Checks of what callers pass, each naming the argument, the value and the rule."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_comm import integers
from deep_comm.errors import ArgumentError, HandleMismatch

if TYPE_CHECKING:
    from deep_comm.backends import Launch

MAX_TOPK = 64
MAX_EXPERTS = 56 << 10  # counters of 4 bytes, and a little more, in 227 KiB of shared memory
ROW_ALIGNMENT = 16
SCALE_BLOCK = 128  # columns of a row that share a scale when the engine quantises
MAX_EXPERT_ALIGNMENT = 1 << 16  # so that sums of padded counts stay below 2**31
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


class PayloadForm:
    """What payloads have in common but for their tokens; one object a
    form, so that it can be a key.

    Attributes:
        dtype, scale_dtype: of what is received; scale_dtype None: no scales.
        quantises, round_scale, use_ue8m0: bfloat16 rows are cast to FP8 on their way.
        cast: the three in one number, as ScaleOptions.cast.
    """

    __slots__ = (
        "dtype",
        "hidden",
        "row_bytes",
        "scale_dtype",
        "num_scales",
        "scale_bytes",
        "scale_row_bytes",
        "quantises",
        "round_scale",
        "use_ue8m0",
        "cast",
    )

    def __init__(
        self, dtype: torch.dtype, hidden: int, scale_dtype: torch.dtype | None, num_scales: int,
        quantises: bool = False, round_scale: bool = False, use_ue8m0: bool = False,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self.hidden = hidden
        self.row_bytes = hidden * dtype.itemsize
        self.scale_dtype = scale_dtype
        self.num_scales = num_scales
        self.scale_bytes = 0 if scale_dtype is None else scale_dtype.itemsize
        self.scale_row_bytes = num_scales * self.scale_bytes
        self.quantises = quantises
        self.round_scale = round_scale
        self.use_ue8m0 = use_ue8m0
        self.cast = quantises | round_scale << 1 | use_ue8m0 << 2


@functools.lru_cache(maxsize=1024)
def _form(
    dtype: torch.dtype, hidden: int, scale_dtype: torch.dtype | None = None, num_scales: int = 0
) -> PayloadForm:
    """Raises ArgumentError if rows are not of a size that kernels move."""
    _row_bytes("x", hidden * dtype.itemsize)
    return PayloadForm(dtype, hidden, scale_dtype, num_scales)


@functools.lru_cache(maxsize=256)
def _quantised_form(hidden: int, round_scale: bool, use_ue8m0: bool) -> PayloadForm:
    num_blocks = hidden // SCALE_BLOCK
    return PayloadForm(
        torch.float8_e4m3fn, hidden, torch.int32 if use_ue8m0 else torch.float32,
        -(-num_blocks // 4) if use_ue8m0 else num_blocks, True, round_scale, use_ue8m0,
    )  # fmt: skip


class Payload:
    """x and its scales, as the engine takes them."""

    __slots__ = ("x", "scales", "num_tokens", "form", "address")

    def __init__(
        self, x: Tensor, scales: Tensor | None, num_tokens: int, form: PayloadForm, address: int
    ) -> None:
        self.x = x  # [T, H]
        self.scales = scales  # [T, S], any strides
        self.num_tokens = num_tokens
        self.form = form
        self.address = address  # of x; an empty tensor has none

    @property
    def hidden(self) -> int:
        return self.form.hidden

    @property
    def row_bytes(self) -> int:
        return self.form.row_bytes

    @property
    def num_scales(self) -> int:
        return self.form.num_scales

    @property
    def scale_bytes(self) -> int:
        return self.form.scale_bytes

    @property
    def scale_row_bytes(self) -> int:
        return self.form.scale_row_bytes


class QuantisedPayload(Payload):
    """bfloat16 rows that the engine casts to FP8 on their way: e4m3, a scale for 128 columns.

    ``x`` and ``scales`` are its scratch, which ring mode sends from; ``allocate`` makes them.
    """

    __slots__ = ("source",)

    def __init__(self, source: Tensor, form: PayloadForm) -> None:
        self.source = source  # [T, H]
        self.num_tokens = source.shape[0]
        self.form = form

    def allocate(self, launch: Launch) -> None:
        form = self.form
        assert form.scale_dtype is not None
        self.x = launch.empty((self.num_tokens, form.hidden), form.dtype)
        self.scales = launch.empty((self.num_tokens, form.num_scales), form.scale_dtype)
        self.address = self.x.data_ptr()


def _row_bytes(name: str, row_bytes: int) -> None:
    if row_bytes == 0 or row_bytes % ROW_ALIGNMENT != 0:
        raise ArgumentError(
            name,
            f"rows of {row_bytes} bytes",
            f"must have rows of a positive multiple of {ROW_ALIGNMENT} bytes",
        )


def _aligned(name: str, x: Tensor) -> int:
    """The address of ``x``."""
    address = x.data_ptr()
    if address % ROW_ALIGNMENT != 0:
        raise ArgumentError(
            name, f"address {address:#x}", f"must start at a multiple of {ROW_ALIGNMENT} bytes"
        )
    return address


def payload(x: Any, device: torch.device) -> Payload:
    """dispatch's x: a tensor, or a pair of a tensor and its scales."""
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ArgumentError("x", f"{len(x)} items", "must be a tensor or (tensor, scales)")
        x, scales = x
    if not (isinstance(x, Tensor) and x.dim() == 2 and x.device == device and x.is_contiguous()):
        x = tensor("x", x, device, shape=(None, None))
    num_tokens, hidden = x.shape
    form = _form(x.dtype, hidden)
    address = x.data_ptr()
    if address % ROW_ALIGNMENT != 0:
        _aligned("x", x)
    if scales is not None:
        if not (
            isinstance(scales, Tensor)
            and scales.dim() == 2
            and scales.device == device
            and scales.shape[0] == num_tokens
        ):
            scales = tensor("x_scales", scales, device, shape=(num_tokens, None), contiguous=False)
        num_scales = scales.shape[1]
        if scales.element_size() not in (1, 2, 4, 8):
            raise ArgumentError(
                "x_scales", scales.dtype, "must have elements of 1, 2, 4 or 8 bytes"
            )
        if num_scales == 0:
            raise ArgumentError("x_scales", list(scales.shape), "must have at least one column")
        form = _form(x.dtype, hidden, scales.dtype, num_scales)
    return Payload(x, scales, num_tokens, form, address)


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
    _aligned("x", x)
    return QuantisedPayload(x, _quantised_form(x.shape[1], bool(round_scale), bool(use_ue8m0)))


def combine_input(x: Any, device: torch.device) -> Tensor:
    if not (
        isinstance(x, Tensor)
        and x.dim() == 2
        and x.device == device
        and x.dtype in COMBINE_DTYPES
        and x.is_contiguous()
    ):
        x = tensor("x", x, device, shape=(None, None), dtypes=COMBINE_DTYPES)
    if x.shape[1] == 0 or x.shape[1] * x.element_size() % ROW_ALIGNMENT != 0:
        _row_bytes("x", x.shape[1] * x.element_size())
    if x.data_ptr() % ROW_ALIGNMENT != 0:
        _aligned("x", x)
    return x


def topk_idx(value: Any, device: torch.device, num_tokens: int | None = None) -> Tensor:
    if (
        num_tokens is None
        and isinstance(value, Tensor)
        and value.dtype in TOPK_IDX_DTYPES
        and value.dim() == 2
        and value.device == device
        and value.is_contiguous()
        and 1 <= value.shape[1] <= MAX_TOPK
    ):
        return value
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


def row_weights(value: object, device: torch.device, num_rows: int) -> Tensor:
    """What combine is given beside x: float32 [N, K]."""
    return tensor("topk_weights", value, device, shape=(num_rows, None), dtypes=(torch.float32,))


def require_num_rows(known: int, num_rows: int) -> None:
    """Raise HandleMismatch unless x of a combine has the rows that the dispatch returned."""
    if known != num_rows:
        raise HandleMismatch(
            "handle",
            f"{known} received rows",
            f"must be of a dispatch that returned as many rows as x has ({num_rows})",
        )


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
    note = " (num_max_experts of the Buffer)"
    return integers.require("num_experts", value, 1, num_max_experts, note=note)


def expert_alignment(value: Any) -> int:
    return integers.require("expert_alignment", value, 1, MAX_EXPERT_ALIGNMENT)
