"""all_gather, reduce_scatter, all_reduce."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError
from deep_comm.log import warn_of_lost_gradient
from deep_comm.settings import checks
from deep_comm.symmetric import SymmetricMemory, SymmetricTensor

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "gather",
    "reduce",
    "reduce_scatter",
    "require_memory",
    "scatter",
]

Method = Literal["auto", "one_shot", "two_shot"]
_METHODS = {"auto": 0, "one_shot": 1, "two_shot": 2}


def require_memory(memory: SymmetricMemory) -> None:
    if not isinstance(memory, SymmetricMemory):
        rule = "must be a deep_comm.symmetric.SymmetricMemory"
        raise ArgumentError("memory", f"a {type(memory).__name__}", rule)


def _calls(memory: SymmetricMemory, num_sms: int | None) -> tuple[Any, int]:
    require_memory(memory)
    return memory.native_calls, memory.num_sms if num_sms is None else num_sms


def _resolved(x: Tensor) -> Tensor:
    """Kernels read bytes, where torch may only have noted a conjugate or a sign."""
    return x.resolve_conj().resolve_neg() if isinstance(x, Tensor) else x


def digest_of(*agreed: int | tuple[int, ...]) -> int:
    """Of what the ranks compare. Of integers only, whose hashes are the same in every process."""
    return hash(agreed) & 0x7FFFFFFF


# Collectives of products. ``digest``: of what ranks must agree on besides the shape and dtype of x.


def gather(x: Tensor, memory: SymmetricMemory, digest: int, num_sms: int | None = None) -> Tensor:
    calls, sms = _calls(memory, num_sms)
    gathered: Tensor = calls.all_gather(_resolved(x), sms, digest)
    return gathered


def scatter(x: Tensor, memory: SymmetricMemory, digest: int, num_sms: int | None = None) -> Tensor:
    calls, sms = _calls(memory, num_sms)
    scattered: Tensor = calls.reduce_scatter(_resolved(x), sms, digest)
    return scattered


def reduce(
    x: Tensor,
    memory: SymmetricMemory,
    digest: int,
    method: Method = "auto",
    num_sms: int | None = None,
) -> Tensor:
    calls, sms = _calls(memory, num_sms)
    total: Tensor = calls.all_reduce(_resolved(x), _METHODS[method], sms, digest)
    return total


def all_gather(
    x: Tensor,
    memory: SymmetricMemory,
    *,
    out: SymmetricTensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Every rank's x, one after the other.

    Args:
        x: [N, ...] of any dtype, contiguous; the same shape and dtype on all ranks.
        memory: whose ranks take part. Without ``out``, ranks push x into it.
        out: [R * N, ...] of ``memory`` and of x's dtype. Then copy engines bring x to the peers'
            ``out``, between two barriers, and no SM moves data. It is the fastest where
            x lies in its place, rows rank * N and those after it of ``out.local``; from elsewhere
            it is copied there. x lies in no other rows of ``out``. The result is this memory: the
            next call with it overwrites it. All ranks give the same ``out``, or none.
        num_sms: the most SMs to use, the same on all ranks. Default: ``memory.num_sms``. Not with
            ``out``.

    Returns:
        [R * N, ...] of x's dtype.

    Raises:
        ArgumentError: x or num_sms breaks a rule; on this rank, before anything is launched.
        BufferTooSmall: ``staging_bytes`` of the memory.
        ConfigMismatch: a rank has called something else, or with another x. On CUDA devices a later
            call raises this and the next.
        PeerTimeout: a rank has not called it.
    """
    if getattr(x, "requires_grad", False):
        warn_of_lost_gradient("deep_comm.tp.all_gather", "torch.ops.deep_comm.fused_* have")
    if out is not None:
        require_memory(memory)
        if not (isinstance(out, SymmetricTensor) and out.is_of(memory)):
            rule = "must be a SymmetricTensor of this memory"
            raise ArgumentError("out", f"a {type(out).__name__}", rule)
        if num_sms is not None:
            raise ArgumentError("num_sms", num_sms, "must be None with out: no SM moves data then")
        return _gather_by_copies(x, memory, out)
    return gather(x, memory, 0, num_sms)


def _gather_by_copies(x: Tensor, memory: SymmetricMemory, out: SymmetricTensor) -> Tensor:
    checks.tensor(
        "x", x, memory.device, shape=[None] * max(1, getattr(x, "ndim", 1)), dtypes={out.dtype}
    )
    x = _resolved(x.detach())  # detached, or out would keep the graph of every call
    rows, *rest = x.shape
    if out.shape != (memory.group_size * rows, *rest):
        rule = f"must be ranks * rows of x by its other extents, x being {list(x.shape)}"
        raise ArgumentError("out", list(out.shape), rule)
    num_bytes = x.numel() * x.element_size()
    first, begin = x.data_ptr(), out.local.data_ptr()
    is_own = first == begin + memory.rank * num_bytes
    if begin - num_bytes < first < begin + memory.group_size * num_bytes and not is_own:
        rule = f"must not lie in out, except in rows {memory.rank * rows} and those after it"
        raise ArgumentError("x", "other rows of it", rule)
    own = slice(memory.rank * rows, (memory.rank + 1) * rows)
    if not is_own:
        out.local[own].copy_(x)
    # After it nobody reads the last result; after the other one all rows have arrived.
    memory._context.barrier(digest_of(out.offset, out.shape))
    for turn in range(1, memory.group_size):
        peer = (memory.rank + turn) % memory.group_size
        out.peer(peer)[own].copy_(out.local[own])
    memory.barrier()
    return out.local


def reduce_scatter(x: Tensor, memory: SymmetricMemory, *, num_sms: int | None = None) -> Tensor:
    """This rank's rows of the sum of every rank's x.

    Args:
        x: [R * N, ...] bf16, fp16 or float32, contiguous; the same shape and dtype on all ranks.
        memory, num_sms: as of ``all_gather``.

    Returns:
        [N, ...] of x's dtype: rows rank * N and those after it.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather``.
    """
    if getattr(x, "requires_grad", False):
        warn_of_lost_gradient("deep_comm.tp.reduce_scatter", "torch.ops.deep_comm.fused_* have")
    return scatter(x, memory, 0, num_sms)


def all_reduce(
    x: Tensor, memory: SymmetricMemory, *, method: Method = "auto", num_sms: int | None = None
) -> Tensor:
    """The sum of every rank's x.

    Args:
        x: bf16, fp16 or float32 of any shape, contiguous; the same shape and dtype on all ranks.
        memory, num_sms: as of ``all_gather``.
        method: "one_shot": every rank adds everything, for small x. "two_shot": every rank adds a
            part and pushes the sum. "auto" chooses by the size, alike on all ranks. The result
            has the same bits. Over memory with multicast only two shots have the same bits on every
            rank; "auto" takes one only with two ranks: sums of two have no order.

    Returns:
        A tensor as x.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather``.
    """
    if method not in tuple(_METHODS):
        raise ArgumentError("method", method, f"must be one of {', '.join(_METHODS)}")
    if getattr(x, "requires_grad", False):
        warn_of_lost_gradient("deep_comm.tp.all_reduce", "torch.ops.deep_comm.fused_* have")
    return reduce(x, memory, 0, method, num_sms)


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    memory: SymmetricMemory,
    *,
    eps: float = 1e-6,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of every rank's x plus a residual, and its rows normalised (RMSNorm), in one kernel.

    Two shots: every rank adds and normalises a part of the rows, pushes the sums, and normalises
    the others'. Sums, the residual's sum and the normalised rows are each rounded once.

    Args:
        x: [M, N] bf16, fp16 or float32, contiguous; the same shape and dtype on all ranks. Rows of
            a multiple of 16 bytes, as all tensors here.
        residual: as x, with the same values on all ranks.
        weight: [N] of x's dtype, with the same values on all ranks.
        memory, num_sms: as of ``all_gather``.
        eps: added to the mean of the squares; the same on all ranks.

    Returns:
        (normed, residual): [M, N] each, the same bits on every rank, with multicast too.
        residual = sum + residual; normed = residual / sqrt(mean(residual²) + eps) * weight.

    Raises:
        ArgumentError, BufferTooSmall, ConfigMismatch, PeerTimeout: as of ``all_gather``.
    """
    if not (isinstance(eps, (int, float)) and 0 <= eps <= torch.finfo(torch.float32).max):
        raise ArgumentError("eps", eps, "must be a finite number in float32, at least 0")
    if any(getattr(each, "requires_grad", False) for each in (x, residual, weight)):
        warn_of_lost_gradient("deep_comm.tp.all_reduce_norm", "torch.ops.deep_comm.fused_* have")
    calls, sms = _calls(memory, num_sms)
    given = _resolved(x), _resolved(residual), _resolved(weight)
    normed, total = calls.all_reduce_norm(*given, float(eps), sms)
    return normed, total
