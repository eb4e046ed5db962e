"""The steps of a layer: which mode a call takes, and the exchanges that follow from it.

What an exchange is made of is in calls.py, which also checks the arguments; the rule of "auto" in
mode.py, gradients in autograd.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, is_grad_enabled

from deep_comm._core import Decoded, HostCounters, Prefilled
from deep_comm.context.shape import Mode, check_mode
from deep_comm.errors import ArgumentError
from deep_comm.layer import autograd
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.calls import LayerCalls, Receive
from deep_comm.layer.host_counters import max_tokens_of_step, shared_counters
from deep_comm.layer.mode import ModeRule
from deep_comm.layer.pending import Pending

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer
    from deep_comm.context.shape import MoEShape

Experts = Callable[[ExpertBatch], Tensor]
"""Rows of a batch to rows of the same shape and the layer's dtype."""

Way = Literal["prefill", "decode", "learn", "ask"]
"""How a step is taken: "learn" is prefill that tells the rule, "ask" decode that may go on with
prefill."""


class Steps:
    """Of one layer on one rank."""

    def __init__(
        self,
        buffer: Buffer,
        shape: MoEShape,
        expert_alignment: int,
        max_recv_rows: int,
        can_decode: bool,
    ) -> None:
        self.buffer = buffer
        # What every step asks: properties of the shape work them out anew.
        self._decode_tokens, self._may_exceed = shape.decode_tokens, shape.may_exceed
        self._sends_fp8 = shape.fp8
        self.can_decode = can_decode
        self.is_capturing: Callable[[], bool] = buffer._context.backend.is_capturing
        self.rule = ModeRule(shape.decode_tokens)
        self.calls = LayerCalls(
            buffer, shape, self.rule, expert_alignment, max_recv_rows, can_decode
        )
        counters: HostCounters | None = None
        ctx = buffer._context
        if can_decode and self._may_exceed and ctx.num_ranks > 1 and ctx.topology.num_nodes == 1:
            counters = shared_counters(ctx.rendezvous)
        self.use_counters(counters)

    def use_counters(self, counters: HostCounters | None) -> None:
        """Share the tokens of exchanges among the ranks of a host; alike on all ranks."""
        self._host_counters = counters
        self.calls.use_counters(counters)

    def begin_anew(self) -> None:
        """Collective."""
        self.rule.begin_anew()
        counters = self._host_counters  # of all ranks, or of none
        if counters is not None:
            # Ranks may have failed in different exchanges.
            told = self.buffer._context.rendezvous.all_gather_object(counters.exchange())
            counters.set_exchange(max(told) + 2)

    # ---- which mode ----------------------------------------------------------------------------

    def way(self, mode: Mode, bounded: bool) -> Way:
        if mode == "auto":
            if bounded:
                raise ArgumentError("bounded", True, 'needs mode="prefill": "auto" needs counts')
            if not self.can_decode or is_grad_enabled():
                return "learn"
            if self._may_exceed and not self.is_capturing():
                return "ask" if self.rule.begins_with_decode else "learn"
            return "decode"
        if mode == "prefill":
            return "prefill"
        if mode != "decode":
            check_mode(mode)
        if not self.can_decode:
            raise no_decode()
        return "decode"

    def needs_grad(self, x: Tensor, topk_weights: Tensor) -> bool:
        """Where gradients are enabled. What is no tensor is refused by the calls."""
        for name, part in (("x", x), ("topk_weights", topk_weights)):
            if getattr(part, "requires_grad", False):
                if self._sends_fp8:
                    rule = "must not require a gradient in a layer with fp8=True"
                    raise ArgumentError(name, None, rule)
                return True
        return False

    def _refuse_grad(self, x: Tensor, topk_weights: Tensor) -> None:
        if self.needs_grad(x, topk_weights):
            raise ArgumentError(
                "mode", "decode", "has no gradients: call under torch.no_grad(), or with prefill"
            )

    # ---- dispatch and combine ------------------------------------------------------------------

    def ask(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Experts,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """A step that begins with decode, on all ranks, and goes on with prefill if one needs it:
        the answer is looked at behind experts and combine."""
        y_shared = None
        if shared is None:
            batch = self.calls.decode(x, topk_idx, topk_weights, True)
        else:
            batch, hook = self.calls.begin_decode(x, topk_idx, topk_weights, True)
            try:
                y_shared = shared(x)
            finally:  # the peers, and the next call, count on this rank's receive phase
                hook()
        state = batch.state
        y, were_few = self.calls.finish(experts(batch), state)
        del batch
        if were_few is None:
            were_few = self.rule.learn(self._most(state))
        if not were_few:
            del state
            fits = x.shape[0] <= self._decode_tokens
            late = self._prefill_late(fits, x, topk_idx, topk_weights, experts)
            y = y if fits else late
        return y if y_shared is None else y + y_shared

    def _prefill_late(
        self, fits: bool, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Experts
    ) -> Tensor:
        """The rest of a step that began with decode. Ranks that have been served, because their
        tokens fit, take part with nothing, as hosts of their experts."""
        share = slice(0, 0) if fits else slice(None)
        batch = self._prefill(x[share], topk_idx[share], topk_weights[share], False)
        return self.combine(batch, experts(batch))

    def _most(self, state: Decoded) -> int:
        """Tokens of any rank in an exchange that asks: the last one."""
        if self._host_counters is None:
            return self.buffer.wait_low_latency_num_tokens()
        return max_tokens_of_step(self.buffer._context, self._host_counters, state)

    def _learn(self, batch: ExpertBatch) -> ExpertBatch:
        most = batch.state.max_num_tokens
        if most is not None:  # None: bounded, while a graph is captured
            self.rule.learn(most)
        return batch

    def dispatch(
        self, way: Way, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bounded: bool
    ) -> ExpertBatch:
        if way == "decode":
            if is_grad_enabled():
                self._refuse_grad(x, topk_weights)
            return self.calls.decode(x, topk_idx, topk_weights, False)
        if way == "ask":
            batch = self.calls.decode(x, topk_idx, topk_weights, True)
            if self.rule.learn(self._most(batch.state)):
                return batch
            return self._prefill(x, topk_idx, topk_weights, False)
        batch = self._prefill(x, topk_idx, topk_weights, bounded or self.is_capturing())
        return self._learn(batch) if way == "learn" else batch

    def dispatch_async(
        self, way: Way, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bounded: bool
    ) -> Pending[ExpertBatch]:
        if way == "decode" or way == "ask":
            if is_grad_enabled():
                self._refuse_grad(x, topk_weights)
            batch, hook = self.calls.begin_decode(x, topk_idx, topk_weights, way == "ask")
            were_few = True if way == "decode" else None
            has_come = False

            def receive() -> ExpertBatch:
                # After BufferInUse it goes on where it was refused.
                nonlocal were_few, has_come
                if not has_come:
                    hook()
                    has_come = True
                if were_few is None:
                    were_few = self.rule.learn(self._most(batch.state))
                if were_few:
                    return batch
                return self._prefill(x, topk_idx, topk_weights, False)

            return Pending(receive)
        receive_rows = self._begin_prefill(
            x, topk_idx, topk_weights, bounded or self.is_capturing()
        )
        return Pending(receive_rows if way != "learn" else lambda: self._learn(receive_rows()))

    def combine(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        if not isinstance(batch, ExpertBatch):
            raise _no_batch(batch)
        state = batch.state
        if is_grad_enabled() and _has_grad(rows, state):
            return autograd.combine(
                self.buffer, rows, state, functools.partial(self.calls.combine, rows, state)
            )
        return self.calls.combine(rows, state)

    def combine_async(self, batch: ExpertBatch, rows: Tensor) -> Pending[Tensor]:
        if not isinstance(batch, ExpertBatch):
            raise _no_batch(batch)
        state = batch.state
        if not (is_grad_enabled() and _has_grad(rows, state)):
            combined, receive = self.calls.begin_combine(rows, state)
            return Pending(_after(receive, combined))
        receives: list[Callable[[], None]] = []

        def send() -> Tensor:
            combined, receive = self.calls.begin_combine(rows, state)
            receives.append(receive)
            return combined

        combined = autograd.combine(self.buffer, rows, state, send)
        return Pending(_after(receives[0], combined))

    # ---- prefill, with gradients around it -----------------------------------------------------

    def _prefill(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_bounded: bool
    ) -> ExpertBatch:
        if not (is_grad_enabled() and self.needs_grad(x, topk_weights)):
            return self.calls.prefill(x, topk_idx, topk_weights, is_bounded)
        return autograd.dispatched(
            self.buffer, x, topk_weights,
            lambda: self.calls.prefill(x.detach(), topk_idx, topk_weights.detach(), is_bounded),
        )  # fmt: skip

    def _begin_prefill(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_bounded: bool
    ) -> Receive:
        if not (is_grad_enabled() and self.needs_grad(x, topk_weights)):
            return self.calls.begin_prefill(x, topk_idx, topk_weights, is_bounded)
        receive = self.calls.begin_prefill(x.detach(), topk_idx, topk_weights.detach(), is_bounded)

        def finish() -> ExpertBatch:
            with torch.enable_grad():  # as it was when the exchange was sent
                return autograd.dispatched(self.buffer, x, topk_weights, receive)

        return finish


def no_decode() -> ArgumentError:
    return ArgumentError("mode", "decode", "needs a layer that is built for it")


def _no_batch(given: object) -> ArgumentError:
    return ArgumentError("batch", f"a {type(given).__name__}", "must be what dispatch returned")


def _has_grad(rows: Tensor, state: Decoded | Prefilled) -> bool:
    """Decode batches have none; what is no tensor is refused by the calls."""
    if type(state) is not Prefilled:
        return False
    return getattr(rows, "requires_grad", False) or state.weights.requires_grad


def _after(wait: Callable[[], None], value: Tensor) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        wait()
        return value

    return finish
