"""The layer in ``torch.compile`` graphs: dispatch and combine as opaque custom operators.

What they do depends on the other ranks, so the compiler sees shapes only: rows whose number is
known when they have come, or, with mode="decode", fixed. Between them ``experts`` is traced like
anything else; its batch has counts and offsets on the device.

Operators that exchange are registered as having an effect, so that a compiler neither drops nor
reorders them: a rank whose result is empty, or not used, has its peers wait all the same. What has
come is fetched by an operator without effect, since inductor (2.13) does not know sizes that an
operator with an effect and several results finds out.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._higher_order_ops import effects

from deep_comm._core import Prefilled
from deep_comm.buffer import Buffer
from deep_comm.context.shape import Mode, MoEShape, check_mode
from deep_comm.errors import ArgumentError, DeepCommError
from deep_comm.layer import autograd
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.steps import Steps, Way, no_decode


class Layer(Protocol):
    """What is needed of an ExpertParallel."""

    buffer: Buffer
    mode: Mode
    shape: MoEShape
    _key: str
    _steps: Steps


_layers: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
# Operators pass tensors only: a state tensor holds the number under which the rest is found here.
_states: dict[int, Any] = {}


class _Number(bytearray):
    """Memory of a state tensor. It dies with the tensor's storage, and with it the state."""


def register(layer: Layer) -> str:
    key = str(next(_keys))  # a number would be traced as a symbol
    _layers[key] = layer
    return key


def _layer(key: str) -> Layer:
    layer = _layers.get(key)
    if layer is None:
        raise DeepCommError("a compiled graph outlived its ExpertParallel")
    return layer


def _keep(state: Any) -> Tensor:
    key = next(_keys)
    number = _Number(key.to_bytes(8, "little"))
    _states[key] = state
    weakref.finalize(number, _states.pop, key, None)
    return torch.frombuffer(number, dtype=torch.int64)


def _kept(state: Tensor) -> Any:
    found = _states.get(int(state[0]))
    if found is None:
        raise DeepCommError(
            "the state of a batch is gone: its dispatch was of another run, or hooks of saved "
            "tensors (activation offload) have put a copy in its place"
        )
    return found


class _Kept:
    """A batch between its operators. Its rows are handed out once: they
    belong to the graph then.
    """

    __slots__ = ("batch", "state")

    def __init__(self, batch: ExpertBatch) -> None:
        self.batch: ExpertBatch | None = batch
        self.state = batch.state

    def take(self) -> ExpertBatch:
        if self.batch is None:
            raise DeepCommError("the rows of a batch have been fetched twice")
        batch, self.batch = self.batch, None
        return batch


@torch.library.custom_op("deep_comm::ep_dispatch", mutates_args=())
def ep_dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, layer: str, way: str, bounded: bool
) -> Tensor:
    """The state of a batch that has come."""
    steps = _layer(layer)._steps
    with torch.no_grad():
        chosen: Way = "learn" if way == "learn" else steps.way(cast("Mode", way), bounded)
        return _keep(_Kept(steps.dispatch(chosen, x, topk_idx, topk_weights, bounded)))


@ep_dispatch.register_fake
def _(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, layer: str, way: str, bounded: bool
) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("deep_comm::ep_rows", mutates_args=())
def ep_rows(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, state: Tensor, layer: str, way: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, scales, weights of rows (decode: none), counts, offsets of the batch.

    The rest of the arguments is what gradients are of.
    """
    kept: _Kept = _kept(state)
    batch, of_batch = kept.take(), kept.state
    no_weights = topk_weights.new_empty(0)
    scales = batch.scales
    return (
        batch.x,
        x.new_empty(0, 0, dtype=torch.float32) if scales is None else scales.contiguous(),
        of_batch.weights if type(of_batch) is Prefilled else no_weights,
        # The graph may write over its results, and combine and gradients need these.
        batch.num_tokens_per_expert.clone(),
        batch.offsets.clone(),
    )


@ep_rows.register_fake
def _(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, state: Tensor, layer: str, way: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owner = _layer(layer)
    shape, calls = owner.shape, owner._steps.calls
    num_rows: Any = calls.num_local * calls.capacity
    num_weights: Any = 0
    if way != "decode":
        ctx = torch.library.get_ctx()
        # Of rows and of weights: as many, unless the step is found to be a decode step.
        num_rows, num_weights = ctx.new_dynamic_size(), ctx.new_dynamic_size()
    scales = (0, 0) if not shape.fp8 else (num_rows, shape.hidden // 128)
    return (
        x.new_empty(num_rows, shape.hidden, dtype=torch.float8_e4m3fn if shape.fp8 else x.dtype),
        x.new_empty(*scales, dtype=torch.float32),
        topk_weights.new_empty(num_weights),
        x.new_empty(calls.num_local, dtype=torch.int32),
        x.new_empty(calls.num_local + 1, dtype=torch.int32),
    )


@torch.library.custom_op("deep_comm::ep_dispatch_grads", mutates_args=())
def ep_dispatch_grads(
    grad_rows: Tensor, grad_weights: Tensor, topk_idx: Tensor, state: Tensor, layer: str
) -> tuple[Tensor, Tensor]:
    """Of x and of topk_weights."""
    kept: Prefilled = _kept(state).state
    return autograd.dispatch_grads(_layer(layer).buffer, grad_rows, grad_weights, kept.handle)


@ep_dispatch_grads.register_fake
def _(
    grad_rows: Tensor, grad_weights: Tensor, topk_idx: Tensor, state: Tensor, layer: str
) -> tuple[Tensor, Tensor]:
    num_tokens = topk_idx.shape[0]
    return (
        grad_rows.new_empty(num_tokens, grad_rows.shape[1]),
        grad_weights.new_empty(num_tokens, topk_idx.shape[1]),
    )


@torch.library.custom_op("deep_comm::ep_combine", mutates_args=())
def ep_combine(
    rows: Tensor, weights: Tensor, topk_idx: Tensor, state: Tensor, layer: str
) -> Tensor:
    kept = _kept(state).state
    with torch.no_grad():
        if type(kept) is Prefilled:
            kept = kept.weighed_by(weights)
        return _layer(layer)._steps.calls.combine(rows, kept)


@ep_combine.register_fake
def _(rows: Tensor, weights: Tensor, topk_idx: Tensor, state: Tensor, layer: str) -> Tensor:
    return rows.new_empty(topk_idx.shape[0], rows.shape[1])


@torch.library.custom_op("deep_comm::ep_combine_grads", mutates_args=())
def ep_combine_grads(
    grad: Tensor, rows: Tensor, weights: Tensor, state: Tensor, layer: str
) -> tuple[Tensor, Tensor]:
    """Of rows and of weights."""
    kept: Prefilled = _kept(state).state
    return autograd.combine_grads(_layer(layer).buffer, grad, rows, weights, kept.handle)


@ep_combine_grads.register_fake
def _(
    grad: Tensor, rows: Tensor, weights: Tensor, state: Tensor, layer: str
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_idx, _, state, layer, _ = inputs
    rows, _, weights, _, _ = output
    ctx.save_for_backward(topk_idx, state)
    ctx.layer = layer
    ctx.rows_like, ctx.weights_like = (rows.shape, rows.dtype), weights.shape


def _rows_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    topk_idx, state = ctx.saved_tensors
    grad_rows, grad_weights = grads[0], grads[2]
    # All ranks take part in the exchange, also one whose loss used neither.
    if grad_rows is None:
        shape, dtype = ctx.rows_like
        grad_rows = torch.zeros(shape, dtype=dtype, device=topk_idx.device)
    if grad_weights is None:
        grad_weights = torch.zeros(ctx.weights_like, dtype=torch.float32, device=topk_idx.device)
    grad_x, grad_topk_weights = ep_dispatch_grads(
        grad_rows, grad_weights, topk_idx, state, ctx.layer
    )
    return grad_x, None, grad_topk_weights, None, None, None


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, _, state, layer = inputs
    ctx.save_for_backward(rows, weights, state)
    ctx.layer = layer


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weights, state = ctx.saved_tensors
    grad_rows, grad_weights = ep_combine_grads(grad, rows, weights, state, ctx.layer)
    return grad_rows, grad_weights, None, None, None


ep_rows.register_autograd(_rows_backward, setup_context=_setup_rows)
ep_combine.register_autograd(_combine_backward, setup_context=_setup_combine)

for operator in (ep_dispatch, ep_combine, ep_dispatch_grads, ep_combine_grads):
    effects._register_effectful_op(operator._opoverload, effects._EffectType.ORDERED)


def traced_forward(
    layer: Layer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    experts: Callable[[ExpertBatch], Tensor],
    mode: str | None,
    bounded: bool,
) -> Tensor:
    """ExpertParallel.forward while it is being traced."""
    way = layer.mode if mode is None else mode
    check_mode(way)
    if way == "auto" and bounded:
        raise ArgumentError("bounded", True, 'needs mode="prefill": "auto" needs counts')
    needs_grad = torch.is_grad_enabled() and layer._steps.needs_grad(x, topk_weights)
    if way == "decode" and not layer._steps.can_decode:
        raise no_decode()
    if way == "auto":
        if not layer._steps.can_decode or torch.is_grad_enabled():
            way = "learn"
        elif not layer.shape.may_exceed:
            way = "decode"
    if way == "decode" and needs_grad:
        raise ArgumentError("mode", "decode", "has no gradients: compile under torch.no_grad()")
    # What ep_dispatch returns has no gradients: those of x and of the weights come through ep_rows.
    state = ep_dispatch(x, topk_idx, topk_weights, layer._key, way, bounded)
    rows, scales, weights, counts, offsets = ep_rows(
        x, topk_idx, topk_weights, state, layer._key, way
    )
    calls = layer._steps.calls
    is_decode = way == "decode"
    batch = ExpertBatch(
        x=rows,
        scales=scales if layer.shape.fp8 else None,
        num_tokens_per_expert=counts,
        offsets=offsets,
        counts=None,
        capacity=calls.capacity if is_decode else None,
        mode="decode" if is_decode else "prefill",
        first_expert=calls.first_expert,
        alignment=calls.alignment,
        state=None,
    )
    return ep_combine(experts(batch), weights, topk_idx, state, layer._key)
