"""The products as torch ops, with the schemas of torch's ``symm_mem::fused_*``, and in their place.

``torch.ops.deep_comm.fused_*`` can be compiled and have gradients (the unscaled ones). They name a
group; ``register`` says which memory serves it. ``install`` also routes torch's own ops of that
group here, which inductor's asynchronous tensor parallelism emits, and ``fuse_gemm_comms`` of vLLM
0.19.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symmetric
from torch import Tensor
from torch.distributed import distributed_c10d

from deep_comm.errors import ArgumentError, UnsupportedArgument, UnsupportedError
from deep_comm.symmetric import SymmetricMemory
from deep_comm.tp.collectives import require_memory
from deep_comm.tp.matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = ["install", "register"]

_memories: weakref.WeakValueDictionary[str, SymmetricMemory] = weakref.WeakValueDictionary()


def register(group: Any, memory: SymmetricMemory) -> None:
    """Let ``torch.ops.deep_comm.fused_*`` of this group use ``memory``, while it lives.

    Args:
        group: a torch.distributed group, or its name.
        memory: of the same ranks.

    Raises:
        ArgumentError: ``group`` is neither, or ``memory`` no SymmetricMemory of these ranks.
        BufferDestroyed: ``memory`` was destroyed.
    """
    require_memory(memory)
    memory.check()
    name = _name_of(group)
    _require_ranks(name, memory)
    _memories[name] = memory


def _group_of(name: str) -> Any:
    resolve_group: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve_group(name)


def _require_ranks(name: str, memory: SymmetricMemory) -> None:
    """Of a group that torch knows; others are for whoever registers them."""
    try:
        group = _group_of(name)
    except (LookupError, RuntimeError, ValueError):
        return
    place = (group.rank(), group.size())
    if place != (memory.rank, memory.group_size):
        raise ArgumentError(
            "memory",
            f"that of rank {memory.rank} of {memory.group_size}",
            f"must be of the group's ranks, of which this is {place[0]} of {place[1]}",
        )


def _name_of(group: Any) -> str:
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        rule = "must be a torch.distributed group, or its name"
        raise ArgumentError("group", f"a {type(group).__name__}", rule)
    return name


def _memory_of(group_name: str) -> SymmetricMemory:
    memory = _memories.get(group_name)
    if memory is None:
        raise UnsupportedError(
            f"no SymmetricMemory serves the group {group_name!r}: call deep_comm.tp.register"
        )
    return memory


# ---- the calls -----------------------------------------------------------------------------------


def _gather(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    return all_gather_matmul(
        A, Bs, _memory_of(group_name), gather_dim=gather_dim, return_gathered=return_A
    )


def _scatter(A: Tensor, B: Tensor, reduce_op: Any, scatter_dim: int, group_name: str) -> Tensor:
    return matmul_reduce_scatter(
        A, B, _memory_of(group_name), reduce_op=reduce_op, scatter_dim=scatter_dim
    ).contiguous()


def _plain_form(*given: object) -> None:
    """Of the scaled ops: biases and scales of results are torch's alone."""
    if any(value is not None for value in given):
        rule = "must be None: the result has no bias and no scale"
        raise UnsupportedArgument("fused_*scaled*", "bias or result_scale", given, rule)


def _gather_scaled(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    _plain_form(*biases, *result_scales)
    dtypes = set(torch_symmetric._maybe_convert_scalar_types_to_dtypes(out_dtypes))
    if len(dtypes) != 1 or None in dtypes:
        rule = "must be one dtype for all weights"
        raise UnsupportedArgument("fused_all_gather_scaled_matmul", "out_dtypes", out_dtypes, rule)
    memory = _memory_of(group_name)
    if A_scale.numel() > 1 and A_scale.shape[gather_dim] != A.shape[gather_dim]:
        # Every rank has the scales of all rows.
        A_scale = A_scale.chunk(memory.group_size, gather_dim)[memory.rank]
    gathered, outs = all_gather_matmul(
        A,
        Bs,
        memory,
        gather_dim=gather_dim,
        return_gathered=True,
        scales=(A_scale, B_scales),
        out_dtype=dtypes.pop(),
    )
    assert gathered is not None
    return gathered, outs


def _scatter_scaled(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: Any,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    _plain_form(bias, result_scale)
    if out_dtype is None:
        raise UnsupportedArgument(
            "fused_scaled_matmul_reduce_scatter", "out_dtype", None, "must be given"
        )
    if output_shape is not None:
        A = A.view(*output_shape[:-1], A.shape[-1])
        if A_scale.numel() > 1:
            A_scale = A_scale.view(*output_shape[:-1], A_scale.shape[-1])
    return matmul_reduce_scatter(
        A,
        B,
        _memory_of(group_name),
        reduce_op=reduce_op,
        scatter_dim=orig_scatter_dim,
        scales=(A_scale, B_scale),
        out_dtype=out_dtype,
    ).contiguous()


# ---- shapes, for the compiler --------------------------------------------------------------------


def _with_extent(like: Tensor, shape: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(tuple(shape), dtype=dtype or like.dtype)


def _gathered_shape(A: Tensor, gather_dim: int, group_name: str) -> list[Any]:
    shape = list(A.shape)
    shape[gather_dim] = shape[gather_dim] * _memory_of(group_name).group_size
    return shape


def _strided_as_moved(fake: Tensor, dim: int) -> Tensor:
    """As what is gathered along ``dim``: contiguous if that dimension is moved to the front."""
    return fake.movedim(dim, 0).contiguous().movedim(0, dim)


def _fake_gather(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    shape, dim = _gathered_shape(A, gather_dim, group_name), gather_dim % A.dim()
    moved = dim if dim < A.dim() - 1 else 0
    outs = [_strided_as_moved(_with_extent(A, [*shape[:-1], B.shape[1]]), moved) for B in Bs]
    return (_strided_as_moved(_with_extent(A, shape), moved) if return_A else None), outs


def _fake_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // _memory_of(group_name).group_size
    return _with_extent(A, shape)


def _fake_gather_scaled(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Any,
    result_scales: Any,
    out_dtypes: Any,
    use_fast_accum: Any,
) -> tuple[Tensor | None, list[Tensor]]:
    dtypes = torch_symmetric._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    gathered, outs = _fake_gather(A, Bs, gather_dim, group_name)
    typed = [out.to(dtype) for out, dtype in zip(outs, dtypes, strict=True)]
    return gathered, typed


def _fake_scatter_scaled(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[Any] | None,
    bias: Any = None,
    result_scale: Any = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    shape = [*A.shape[:-1], B.shape[1]] if output_shape is None else [*output_shape]
    shape[orig_scatter_dim] = shape[orig_scatter_dim] // _memory_of(group_name).group_size
    return _with_extent(A, shape, out_dtype)


# ---- gradients -----------------------------------------------------------------------------------


def _save_gather(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    A, Bs, ctx.dim, ctx.group_name = inputs
    ctx.save_for_backward(A, *Bs)


def _gather_backward(ctx: Any, grad_gathered: Tensor | None, grads: Sequence[Tensor]) -> Any:
    """The dual is a product and a reduce-scatter. What was gathered is gathered again."""
    A, *Bs = ctx.saved_tensors
    dim = ctx.dim % A.dim()
    weight_grads: list[Tensor] = []
    if Bs:
        gathered, _ = torch.ops.deep_comm.fused_all_gather_matmul(A, [], dim, ctx.group_name)
        whole = gathered.flatten(0, -2)
        weight_grads = [whole.t() @ grad.flatten(0, -2) for grad in grads]
    columns = [grad.to(A.dtype) for grad in grads]
    weights = [B.t() for B in Bs]
    if grad_gathered is not None:  # as columns of a product with the identity
        columns.append(grad_gathered)
        weights.append(torch.eye(grad_gathered.shape[-1], dtype=A.dtype, device=A.device))
    own = torch.ops.deep_comm.fused_matmul_reduce_scatter(
        torch.cat(columns, dim=-1), torch.cat(weights), "sum", dim, ctx.group_name
    )
    return own, weight_grads, None, None


def _save_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.reduce_op, ctx.dim, ctx.group_name = inputs
    ctx.save_for_backward(A, B)


def _scatter_backward(ctx: Any, grad: Tensor) -> Any:
    A, B = ctx.saved_tensors
    if ctx.reduce_op == "avg":
        grad = grad / _memory_of(ctx.group_name).group_size
    gathered, (own,) = torch.ops.deep_comm.fused_all_gather_matmul(
        grad, [B.t()], ctx.dim, ctx.group_name, return_A=True
    )
    return own, A.flatten(0, -2).t() @ gathered.flatten(0, -2), None, None, None


# ---- registration --------------------------------------------------------------------------------

_CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fused_all_gather_matmul": (_gather, _fake_gather),
    "fused_matmul_reduce_scatter": (_scatter, _fake_scatter),
    "fused_all_gather_scaled_matmul": (_gather_scaled, _fake_gather_scaled),
    "fused_scaled_matmul_reduce_scatter": (_scatter_scaled, _fake_scatter_scaled),
}
_KEYS = ("CPU", "CUDA")

_library = torch.library.Library("deep_comm", "FRAGMENT")
for _op, (_call, _fake) in _CALLS.items():
    _schema = str(getattr(torch.ops.symm_mem, _op).default._schema).removeprefix("symm_mem::")
    _library.define(_schema)
    for _key in _KEYS:
        _library.impl(_op, _call, _key)
    torch.library.register_fake(f"deep_comm::{_op}", _fake, lib=_library)
torch.library.register_autograd(
    "deep_comm::fused_all_gather_matmul",
    _gather_backward,
    setup_context=_save_gather,
    lib=_library,
)
torch.library.register_autograd(
    "deep_comm::fused_matmul_reduce_scatter",
    _scatter_backward,
    setup_context=_save_scatter,
    lib=_library,
)

_routes: torch.library.Library | None = None


def enable_torch_memory(group_name: Any) -> None:
    """Let inductor see that the group has symmetric memory; torch 2.11 needs no such call and says
    so.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch_symmetric.enable_symm_mem_for_group(group_name)


def install(group: Any, memory: SymmetricMemory) -> None:
    """``register``, and route torch's ``symm_mem::fused_*`` of this group here.

    Other groups, forms that are torch's alone (biases, scales of results), and this group when
    ``memory`` is destroyed or collected, take torch's own implementation as before. What the
    memory cannot serve, such as float64 or more than its ``staging_bytes``, is an error.

    Raises:
        ArgumentError: as of ``register``; or torch knows no group of that name.
        BufferDestroyed: ``memory`` was destroyed.
    """
    global _routes
    require_memory(memory)
    name = _name_of(group)
    try:
        _group_of(name)
    except RuntimeError:
        rule = "must be a torch.distributed group, or its name; torch knows none of that name"
        raise ArgumentError("group", repr(name), rule) from None
    register(group, memory)
    enable_torch_memory(name)
    if _routes is not None:
        return
    _routes = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are overridden, as they must be
        for op, (call, _) in _CALLS.items():
            own = getattr(torch_symmetric, f"_{op}")
            for key in _KEYS:
                _routes.impl(op, _route(op, call, own), key, allow_override=True)


def _route(op: str, call: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    names = [each.name for each in getattr(torch.ops.symm_mem, op).default._schema.arguments]
    place = names.index("group_name")

    def routed(*given: Any, **options: Any) -> Any:
        group_name = given[place] if place < len(given) else options["group_name"]
        memory = _memories.get(group_name)
        if memory is None or memory.is_destroyed:
            return own(*given, **options)
        try:
            return call(*given, **options)
        except UnsupportedArgument:
            return own(*given, **options)

    return routed
