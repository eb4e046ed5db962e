"""The steps of a layer: which mode a call takes, and the exchanges that follow from it.

Arguments of calls are checked here; what an exchange is made of is in transport.py and prefill.py,
the rule of "auto" in mode.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, is_grad_enabled

from deep_comm._core import Decoded
from deep_comm.errors import ArgumentError
from deep_comm.layer import autograd
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.construction import check_mode
from deep_comm.layer.host_words import HostWords, most_tokens
from deep_comm.layer.mode import ModeRule
from deep_comm.layer.pending import Pending
from deep_comm.layer.prefill import Prefilled, Sent
from deep_comm.layer.shape import Mode
from deep_comm.layer.transport import Transport

if TYPE_CHECKING:
    from deep_comm.buffer import Buffer
    from deep_comm.layer.shape import MoEShape

Experts = Callable[[ExpertBatch], Tensor]
"""Rows of a batch to rows of the same shape and the layer's dtype."""

Way = Literal["prefill", "decode", "learn", "ask"]
"""How a step is taken: "learn" is prefill that tells the rule, "ask" decode that may go on with
prefill."""


class Steps:
    """Of one layer on one rank."""

    def __init__(self, buffer: Buffer, transport: Transport, can_decode: bool) -> None:
        self.buffer = buffer
        self.shape: MoEShape = transport.shape
        # What every step asks: properties of the shape work them out anew.
        self._max_tokens, self._decode_tokens = self.shape.max_tokens, self.shape.decode_tokens
        self._hidden, self._dtype = self.shape.hidden, self.shape.dtype
        self._may_exceed = self.shape.may_exceed
        self.transport = transport
        self.can_decode = can_decode
        self.is_capturing: Callable[[], bool] = buffer._context.backend.is_capturing
        self.rule = ModeRule(self.shape.decode_tokens)
        self._max_num_tokens: int | None = None  # of the last prefill exchange
        # What a rank with too many tokens sends in a decode step: tokens that go nowhere.
        num_asking = self.shape.decode_tokens + 1
        shape, device = (num_asking, self.shape.num_topk), buffer.device
        self._nowhere = {
            dtype: torch.full(shape, -1, dtype=dtype, device=device)
            for dtype in (torch.int64, torch.int32)
        }
        self._no_weights = torch.zeros(shape, device=device)
        words: HostWords | None = None
        ctx = buffer._context
        if can_decode and self._may_exceed and ctx.num_ranks > 1 and ctx.topology.num_nodes == 1:
            words = HostWords.create(ctx.rendezvous)
        self.use_words(words)

    def use_words(self, words: HostWords | None) -> None:
        """How the ranks of this host tell one another of exchanges that ask; alike on all."""
        self._host_words = words
        if self.can_decode:
            self.transport.enable_decode(words, self.rule)
        self._begin, self._end, self._finish = self.transport.quick

    def begin_anew(self) -> None:
        """Collective."""
        self.rule.begin_anew()
        words = self._host_words  # of all ranks, or of none
        if words is not None:
            # Ranks may have failed in different exchanges.
            told = self.buffer._context.rendezvous.all_gather_object(words.exchange())
            words.set_exchange(max(told) + 2)

    # ---- which mode ----------------------------------------------------------------------------

    def way(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, mode: Mode, bounded: bool
    ) -> Way:
        shape = self.shape
        for name, given in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if not isinstance(given, Tensor):
                raise ArgumentError(name, type(given).__name__, "must be a tensor")
        num_tokens = self._check(x)
        if topk_idx.dim() != 2 or topk_idx.shape[1] != shape.num_topk:
            rule = f"must be [T, {shape.num_topk}] (num_topk)"
            raise ArgumentError("topk_idx", list(topk_idx.shape), rule)
        check_mode(mode)
        if mode == "auto":
            if bounded:
                raise ArgumentError("bounded", True, 'needs mode="prefill": "auto" wants counts')
            if not self.can_decode or torch.is_grad_enabled():
                return "learn"
            if self._may_exceed and not self.is_capturing():
                return "ask" if self.rule.begins_with_decode else "learn"
            mode = "decode"
        if mode == "prefill":
            return "prefill"
        if num_tokens > shape.decode_tokens:
            raise ArgumentError(
                "x", f"{num_tokens} tokens", f"must have at most {shape.decode_tokens} "
                "(decode_tokens) in a decode step or in a captured one",
            )  # fmt: skip
        if not self.can_decode:
            raise ArgumentError("mode", mode, "needs a layer that is built for it")
        return "decode"

    def _check(self, x: Tensor) -> int:
        extents = x.shape
        if len(extents) != 2 or extents[1] != self._hidden or x.dtype != self._dtype:
            raise ArgumentError(
                "x",
                f"{list(x.shape)} of {x.dtype}",
                f"must be [T, {self._hidden}] of {self._dtype}",
            )
        num_tokens: int = extents[0]
        if num_tokens > self._max_tokens:
            raise ArgumentError(
                "x", f"{num_tokens} tokens", f"must have at most {self._max_tokens} (max_tokens)"
            )
        return num_tokens

    def _needs_grad(self, x: Tensor, topk_weights: Tensor) -> bool:
        if not torch.is_grad_enabled() or not (x.requires_grad or topk_weights.requires_grad):
            return False
        if self.shape.fp8:
            raise ArgumentError("x", "a tensor that requires grad", "must not, with fp8=True")
        return True

    def _learn(self) -> None:
        if self._max_num_tokens is not None:  # None: bounded, while a graph is captured
            self.rule.learn(self._max_num_tokens)

    # ---- dispatch and combine ------------------------------------------------------------------

    def forward_quick(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Experts,
        mode: Mode,
        bounded: bool,
    ) -> Tensor | None:
        """A decode step that is two native calls: nothing in doubt, no gradients and, but for
        decode by name, no capture. None: nothing has happened; ``way`` says how to go on, or what
        is wrong.

        Every line is what the layer costs above the Buffer, and auto above decode: 2 % of a step
        are half a microsecond.
        """
        if is_grad_enabled():
            return None
        is_asking = False
        if mode == "auto":
            if bounded:
                return None
            if not self.can_decode or (self._may_exceed and not self.rule.begins_with_decode):
                return None
            is_asking = self._may_exceed
        elif mode != "decode":
            return None
        batch = self._begin(x, topk_idx, topk_weights, is_asking)
        if batch is None:
            return None
        rows, state = experts(batch), batch.state
        if not is_asking:
            y = self._end(rows, state)
            return self._combine_by_steps(batch, rows) if y is None else y
        most, found = None, self._finish(rows, state)
        if type(found) is Tensor:
            return found
        if found is None:
            y = self._combine_by_steps(batch, rows)
        else:
            y, most = found
        del batch, rows, found
        if not self.rule.learn(self._most(state) if most is None else most):
            del state
            self._prefill_late(True, x, topk_idx, topk_weights, experts)
        return y

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
        batch, hook = self._open(x, topk_idx, topk_weights, shared is not None)
        if shared is not None:
            assert hook is not None
            try:
                y_shared = shared(x)
            finally:  # the peers, and the next call, count on this rank's receive phase
                hook()
        state, fits = batch.state, x.shape[0] <= self._decode_tokens
        y = self.combine(batch, experts(batch))
        del batch
        if not self.rule.learn(self._most(state)):
            del state
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
        if self._host_words is None:
            return self.buffer.wait_low_latency_num_tokens()
        return most_tokens(self.buffer._context, self._host_words, state)

    def dispatch_quick(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, mode: Mode, bounded: bool
    ) -> ExpertBatch | None:
        """The first half of ``forward_quick``, of a step that does not ask."""
        if is_grad_enabled():
            return None
        if mode == "auto":
            if bounded:
                return None
            if not self.can_decode or self._may_exceed:
                return None
        elif mode != "decode":
            return None
        return self._begin(x, topk_idx, topk_weights, False)

    def dispatch(
        self, way: Way, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bounded: bool
    ) -> ExpertBatch:
        if way == "decode":
            return self._decode(x, topk_idx, topk_weights, False)[0]
        if way == "ask":
            batch = self._open(x, topk_idx, topk_weights, False)[0]
            if self.rule.learn(self._most(batch.state)):
                return batch
            return self._prefill(x, topk_idx, topk_weights, False)
        batch = self._prefill(x, topk_idx, topk_weights, bounded or self.is_capturing())
        if way == "learn":
            self._learn()
        return batch

    def dispatch_async(
        self, way: Way, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bounded: bool
    ) -> Pending[ExpertBatch]:
        if way == "decode" or way == "ask":
            step = self._decode if way == "decode" else self._open
            batch, hook = step(x, topk_idx, topk_weights, True)
            assert hook is not None

            def receive() -> ExpertBatch:
                hook()
                if way == "decode" or self.rule.learn(self._most(batch.state)):
                    return batch
                return self._prefill(x, topk_idx, topk_weights, False)

            return Pending(receive)
        finish = self._send(x, topk_idx, topk_weights, bounded or self.is_capturing(), True)

        def receive_rows() -> ExpertBatch:
            batch = finish()
            if way == "learn":
                self._learn()
            return batch

        return Pending(receive_rows)

    def combine(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        state = batch.state
        combined = self._end(rows, state) if type(state) is Decoded else None
        return self._combine_by_steps(batch, rows) if combined is None else combined

    def _combine_by_steps(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        rows, state = self._expert_rows(batch, rows), batch.state
        if type(state) is Decoded:
            return self.transport.decode_combine(rows, state, False)[0]
        return self._prefill_combine(rows, state, False, [])

    def combine_async(self, batch: ExpertBatch, rows: Tensor) -> Pending[Tensor]:
        rows = self._expert_rows(batch, rows)
        state = batch.state
        if type(state) is Decoded:
            combined, hook = self.transport.decode_combine(rows, state, True)
            assert hook is not None
            return Pending(_after(hook, combined))
        events: list[Any] = []
        combined = self._prefill_combine(rows, state, True, events)
        return Pending(_after(events[0].current_stream_wait, combined))

    # ---- exchanges -----------------------------------------------------------------------------

    def _decode(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_async: bool
    ) -> tuple[ExpertBatch, Callable[[], None] | None]:
        if self._needs_grad(x, topk_weights):
            raise ArgumentError(
                "mode", "decode", "has no gradients: call under torch.no_grad(), or with prefill"
            )
        return self.transport.decode(x, topk_idx, topk_weights, is_async, False)

    def _open(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_async: bool
    ) -> tuple[ExpertBatch, Callable[[], None] | None]:
        """A decode exchange that tells all ranks the most tokens; too many are not sent."""
        if x.shape[0] > self._decode_tokens:
            x = x[: self._decode_tokens + 1]
            nowhere = self._nowhere.get(topk_idx.dtype)
            topk_idx = topk_idx[: len(x)] if nowhere is None else nowhere  # refused by its name
            topk_weights = self._no_weights
        return self.transport.decode(x, topk_idx, topk_weights, is_async, True)

    def _prefill(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_bounded: bool
    ) -> ExpertBatch:
        if self._needs_grad(x, topk_weights):
            return self._send(x, topk_idx, topk_weights, is_bounded, False)()
        prefill = self.transport.prefill
        sent = prefill.send(x, topk_idx, topk_weights, is_bounded=is_bounded, is_async=False)
        return self._batch(sent, sent.x, sent.weights)

    def _send(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_bounded: bool,
        is_async: bool,
    ) -> Callable[[], ExpertBatch]:
        """Sends now; the function returned receives, which is also where the host waits."""
        prefill = self.transport.prefill
        needs_grad = self._needs_grad(x, topk_weights)
        sources = x, topk_weights
        if needs_grad:  # gradients begin where rows are received
            sources = x.detach(), topk_weights.detach()
        if is_async and not is_bounded:
            wait = prefill.begin(sources[0], topk_idx, sources[1])
        else:
            sent_now = prefill.send(
                sources[0], topk_idx, sources[1], is_bounded=is_bounded, is_async=is_async
            )

            def wait() -> Sent:
                return sent_now

        def receive() -> Sent:
            sent = wait()
            if is_async:
                sent.event.current_stream_wait()
            return sent

        def finish() -> ExpertBatch:
            if not needs_grad:
                sent = receive()
                return self._batch(sent, sent.x, sent.weights)
            out: list[Sent] = []
            with torch.enable_grad():  # as it was when the exchange was sent
                rows, weights = autograd.Dispatch.apply(  # type: ignore[no-untyped-call]
                    x, topk_weights, prefill, receive, out
                )
            return self._batch(out[0], rows, weights)

        return finish

    def _batch(self, sent: Sent, rows: Tensor, weights: Tensor) -> ExpertBatch:
        self._max_num_tokens = sent.max_num_tokens
        return self.transport.prefill.batch(sent, rows, weights)

    def _expert_rows(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        is_tensor = isinstance(rows, Tensor)
        if not is_tensor or rows.shape != batch.x.shape or rows.dtype != self._dtype:
            given = f"{list(rows.shape)} of {rows.dtype}" if is_tensor else type(rows).__name__
            raise ArgumentError(
                "rows", given,
                f"must be what experts made of the batch: {list(batch.x.shape)} of "
                f"{self.shape.dtype}",
            )  # fmt: skip
        return rows if rows.is_contiguous() else rows.contiguous()

    def _prefill_combine(
        self, rows: Tensor, state: Prefilled, is_async: bool, events: list[Any]
    ) -> Tensor:
        handle, weights, prefill = state.handle, state.weights, self.transport.prefill
        if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
            return autograd.Combine.apply(  # type: ignore[no-untyped-call]
                rows, weights, handle, prefill, is_async, events
            )
        combined, event = prefill.combine(rows, weights, handle, is_async)
        events.append(event)
        return combined


def _after(wait: Callable[[], None], value: Tensor) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        wait()
        return value

    return finish
