"""ExpertParallel: a Mixture-of-Experts layer's communication at every batch size."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from deep_comm import env
from deep_comm.buffer import Buffer
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.layer import autograd, ops
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.mode import ModeRule
from deep_comm.layer.pending import Pending
from deep_comm.layer.prefill import Sent
from deep_comm.layer.shape import (
    DEFAULT_DECODE_TOKENS,
    MODES,
    MemoryEstimate,
    Mode,
    MoEShape,
    estimate_memory,
)
from deep_comm.layer.transport import Decoded, Prefilled, Transport
from deep_comm.topology import (
    discover,
    host_identity,
    num_local_experts,
    requested_ranks_per_node,
)

Experts = Callable[[ExpertBatch], Tensor]
"""Rows of a batch to rows of the same shape and the layer's dtype."""


class ExpertParallel:
    """Dispatch, experts, combine over one Buffer, for any number of tokens::

        layer = deep_comm.ExpertParallel(
            group, hidden=7168, num_experts=256, num_topk=8, max_tokens=4096)
        y = layer(x, topk_idx, topk_weights, experts)

    with ``experts(batch) -> rows``, see ExpertBatch; y[t] is the sum of topk_weights[t, k] times
    the row of expert topk_idx[t, k] for token t. One object serves all layers of a model that
    have this shape. Calls are collective: all ranks make the same calls in the same order, with
    whatever number of tokens each of them has, none included.

    **Mode.** "prefill" takes any number of tokens and its host waits for counts; "decode" is for
    few tokens on every rank, has no host wait and can be captured in CUDA graphs. "auto" takes
    decode for a step in which no rank has more than ``decode_tokens``, without asking the ranks
    first:

    * a step begins as the last one ended: every exchange tells all ranks the most tokens that any
      of them had in it;
    * a prefill step takes any number of tokens;
    * in a decode step a rank with too many tokens says so instead of sending them. All ranks learn
      of it in that exchange and go on with a prefill step for it; the tokens of the other ranks
      have been served by then. So ``experts`` may be called twice in one ``forward``.

    Only decode steps are taken while a CUDA graph is captured and where max_tokens does not
    exceed decode_tokens; only prefill steps where gradients are enabled
    (``torch.is_grad_enabled``) or rows are not bfloat16. Results are the same bits in either mode
    if ``experts`` computes a row the
    same way in either, because both add in the same order and round at the same places: a rank's
    rows of a token in float32, k ascending, to the dtype; those of the ranks in float32, ranks
    ascending, to the dtype.

    Between nodes every step is a prefill step, and a node's rows of a token are added and rounded
    before they cross (InternodeCalls).

    Attributes:
        buffer: what it runs on.
        shape: MoEShape.
        mode: of calls that do not name one.
        memory: MemoryEstimate; ``print(layer.memory)``.
        rule: ModeRule, the state of "auto"; the same on all ranks.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_tokens: int,
        decode_tokens: int | None = None,
        mode: Mode = "auto",
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        expert_alignment: int = 1,
        max_recv_rows: int | None = None,
        buffer: Buffer | None = None,
        device: torch.device | str | int | None = None,
        ranks_per_node: int | None = None,
        timeout_s: float | None = None,
        comm: Any = None,
    ) -> None:
        """Collective over the group; all arguments but devices and timeouts alike on all ranks.

        Args:
            group: as of Buffer.
            hidden, num_experts, num_topk: H, E, K.
            max_tokens: the most tokens that a rank may have in a call.
            decode_tokens: M, the most that "decode" takes; the crossover of "auto". Default:
                DEEP_COMM_DECODE_TOKENS, at most max_tokens. The bench (``--mode layer``) measures
                the crossover of a machine.
            mode: "auto", "prefill" or "decode".
            dtype: of tokens and results. Low-latency mode needs bfloat16.
            fp8: send tokens as float8_e4m3 with a scale for 128 columns. No gradients.
            expert_alignment: groups of prefill batches begin at multiples of it.
            max_recv_rows: rows of prefill batches with bounded counts, padding included: of calls
                with ``bounded=True`` and of captured ones. Default: enough for every selection of
                every rank to come here.
            buffer: take this one instead of building one; it must be large enough, and is not
                destroyed with the layer.
            device, ranks_per_node, timeout_s, comm: of the Buffer to build.

        Raises:
            ArgumentError, UnsupportedError: on this rank.
            ConfigMismatch, TopologyError, PeerLost: on all ranks.
        """
        if mode not in MODES:
            raise ArgumentError("mode", mode, f"must be one of {', '.join(MODES)}")
        if decode_tokens is None and isinstance(max_tokens, int):
            preset = env.DECODE_TOKENS.get()
            decode_tokens = min(DEFAULT_DECODE_TOKENS if preset is None else preset, max_tokens)
        self.shape = MoEShape(
            hidden, num_experts, num_topk, max_tokens,
            max_tokens if decode_tokens is None else decode_tokens, dtype, fp8,
        )  # fmt: skip
        if mode == "decode" and not self.shape.can_decode:
            raise ArgumentError("mode", mode, "needs bfloat16 rows and at most 65535 decode_tokens")
        for name, value in (
            ("expert_alignment", expert_alignment),
            ("max_recv_rows", 1 if max_recv_rows is None else max_recv_rows),
        ):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(name, value, "must be an integer of at least 1")
        self.mode: Mode = mode
        self._owns_buffer = buffer is None
        if buffer is None:
            buffer = self._build(group, comm, device, ranks_per_node, timeout_s)
        self.buffer = buffer
        num_ranks = buffer.group_size
        ctx: Context = buffer._context
        num_nodes = ctx.topology.num_nodes
        self._require_mode_on(num_nodes)
        self.memory = estimate_memory(self.shape, num_ranks, mode, buffer.device.type, num_nodes)
        self._is_capturing = ctx.backend.is_capturing
        try:
            self._agree(ctx, expert_alignment, max_recv_rows)
            # Between nodes there is no low-latency mode yet.
            self._can_decode = self.shape.can_decode and mode != "prefill" and num_nodes == 1
            if self._can_decode:
                self._check_decode(buffer)
        except BaseException:
            self.destroy()
            raise
        self._transport = Transport(
            buffer,
            self.shape,
            expert_alignment,
            self._most_rows(num_ranks, expert_alignment)
            if max_recv_rows is None
            else max_recv_rows,
        )
        self.rule = ModeRule(self.shape.decode_tokens)
        self._max_num_tokens: int | None = None  # of the last prefill exchange
        # What a rank with too many tokens sends in a decode step: tokens that go nowhere.
        num_asking = self.shape.decode_tokens + 1
        self._nowhere = {
            dtype: torch.full((num_asking, num_topk), -1, dtype=dtype, device=buffer.device)
            for dtype in (torch.int64, torch.int32)
        }
        self._no_weights = torch.zeros(num_asking, num_topk, device=buffer.device)
        self._key = ops.register(self)

    def _most_rows(self, num_ranks: int, expert_alignment: int) -> int:
        """That a rank can ever get: every selection there is, and a padding behind each group."""
        shape = self.shape
        num_local = num_local_experts(0, shape.num_experts, num_ranks)
        selections = num_ranks * shape.max_tokens * shape.num_topk
        return selections + num_local * (expert_alignment - 1)

    def _build(
        self, group: Any, comm: Any, device: Any, ranks_per_node: int | None,
        timeout_s: float | None,
    ) -> Buffer:  # fmt: skip
        from deep_comm.backends import resolve_device
        from deep_comm.rendezvous import Rendezvous

        device = resolve_device(device)
        rendezvous = Rendezvous(group, comm)
        hosts = rendezvous.all_gather_object(host_identity())
        num_nodes = discover(hosts, requested_ranks_per_node(ranks_per_node)).num_nodes
        self._require_mode_on(num_nodes)
        memory = estimate_memory(self.shape, rendezvous.size, self.mode, device.type, num_nodes)
        return Buffer(
            group,
            memory.num_nvl_bytes,
            memory.low_latency_region + memory.rail,
            low_latency_mode=memory.low_latency_region > 0,
            comm=comm,
            device=device,
            ranks_per_node=ranks_per_node,
            timeout_s=timeout_s,
            num_max_experts=self.shape.num_experts,
            num_direct_bytes=memory.receive_region,
        )

    def _require_mode_on(self, num_nodes: int) -> None:
        if num_nodes > 1 and self.mode == "decode":
            raise UnsupportedError(
                'mode="decode" between nodes is not in this version; "auto" and "prefill" are prefill'
            )

    def _agree(self, ctx: Context, expert_alignment: int, max_recv_rows: int | None) -> None:
        shape = self.shape
        ctx.rendezvous.require_equal(
            {
                "hidden": shape.hidden,
                "num_experts": shape.num_experts,
                "num_topk": shape.num_topk,
                "max_tokens": shape.max_tokens,
                "decode_tokens": shape.decode_tokens,
                "mode": self.mode,
                "dtype": str(shape.dtype),
                "fp8": shape.fp8,
                "expert_alignment": expert_alignment,
                "max_recv_rows": max_recv_rows,
            }
        )

    def _check_decode(self, buffer: Buffer) -> None:
        """The Buffer's own words for what it lacks."""
        buffer.clean_low_latency_buffer(
            self.shape.num_slots, self.shape.hidden, self.shape.num_experts
        )

    # ---- life cycle ----------------------------------------------------------------------------

    @staticmethod
    def estimate_memory(
        num_ranks: int,
        *,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_tokens: int,
        decode_tokens: int | None = None,
        mode: Mode = "auto",
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        device_type: str = "cuda",
    ) -> MemoryEstimate:
        """What a layer will take, before it is built:
        ``print(ExpertParallel.estimate_memory(...))``."""
        if decode_tokens is None:
            decode_tokens = min(DEFAULT_DECODE_TOKENS, max_tokens)
        shape = MoEShape(hidden, num_experts, num_topk, max_tokens, decode_tokens, dtype, fp8)
        return estimate_memory(shape, num_ranks, mode, device_type)

    def destroy(self) -> None:
        """Free the Buffer, if the layer has built it. Idempotent; waits for no peer."""
        if self._owns_buffer:
            self.buffer.destroy()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Copies of a model share the layer: it has no parameters, and its memory cannot be
        copied."""
        return self

    def reset(self) -> None:
        """After a PeerTimeout: Buffer.reset, and "auto" begins anew. Collective."""
        self.buffer.reset()
        self.rule = ModeRule(self.shape.decode_tokens)

    # ---- operations ----------------------------------------------------------------------------

    def __call__(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Experts,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        mode: Mode | None = None,
        bounded: bool = False,
    ) -> Tensor:
        """forward."""
        return self.forward(
            x, topk_idx, topk_weights, experts, shared=shared, mode=mode, bounded=bounded
        )

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Experts,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        mode: Mode | None = None,
        bounded: bool = False,
    ) -> Tensor:
        """Dispatch, ``experts``, combine. Collective.

        Args:
            x: [T, H] of the layer's dtype.
            topk_idx: int64 or int32 [T, K], global expert indices, -1: no selection.
            topk_weights: float32 [T, K].
            experts: gets an ExpertBatch, returns rows of the layout of its x, of the layer's dtype.
            shared: computed on x while tokens travel, and added to the result.
            mode: for this call; then equal on all ranks.
            bounded: prefill without a host wait, in batches of max_recv_rows rows.

        Returns:
            [T, H] of the dtype of x.

        Raises:
            ArgumentError, BufferTooSmall: nothing was launched.
            ConfigMismatch, ExpertIndexError, CapacityError, PeerTimeout: as of Buffer's dispatch.
        """
        if torch.compiler.is_compiling():
            y = ops.traced_forward(self, x, topk_idx, topk_weights, experts, mode, bounded)
            return y if shared is None else y + shared(x)
        way = self._way(x, mode, bounded)
        if way == "ask":
            return self._ask(x, topk_idx, topk_weights, experts, shared)
        if shared is None:
            batch = self._dispatch(way, x, topk_idx, topk_weights, bounded)
            return self.combine(batch, experts(batch))
        with self._dispatch_async(way, x, topk_idx, topk_weights, bounded) as sent:
            y_shared = shared(x)
        batch = sent.result()
        return self.combine(batch, experts(batch)) + y_shared

    def _ask(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Experts,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """A step that begins with decode, on all ranks, and goes on with prefill if one needs it.

        The answer is looked at last: by then experts and combine are queued, and no SM waits for
        the host.
        """
        fits = x.shape[0] <= self.shape.decode_tokens
        y_shared = None
        if shared is None:
            batch = self._open(x, topk_idx, topk_weights, False)[0]
        else:
            batch, hook = self._open(x, topk_idx, topk_weights, True)
            y_shared = shared(x)
            assert hook is not None
            hook()
        y = self.combine(batch, experts(batch))
        if not self.rule.learn(self.buffer.wait_low_latency_num_tokens()):
            # Those that have been served take part with nothing, as hosts of their experts.
            share = slice(0, 0) if fits else slice(None)
            batch = self._prefill(x[share], topk_idx[share], topk_weights[share], False)
            late = self.combine(batch, experts(batch))
            y = y if fits else late
        return y if y_shared is None else y + y_shared

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        mode: Mode | None = None,
        bounded: bool = False,
    ) -> ExpertBatch:
        """Rows for this rank's experts. Collective; arguments and errors as of forward.

        With "auto" the host waits until the exchange has told how many tokens there are; forward
        need not. In a step in which ranks disagree about the mode, all use dispatch, or all
        forward.
        """
        way = self._way(x, mode, bounded)
        return self._dispatch(way, x, topk_idx, topk_weights, bounded)

    def dispatch_async(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        mode: Mode | None = None,
        bounded: bool = False,
    ) -> Pending[ExpertBatch]:
        """dispatch in two halves: this one sends, ``result()`` receives. See Pending."""
        way = self._way(x, mode, bounded)
        return self._dispatch_async(way, x, topk_idx, topk_weights, bounded)

    def combine(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        """Weighted sums of the experts' rows, at the tokens' ranks. Collective.

        Args:
            batch: of dispatch.
            rows: what the experts made of batch.x; its shape, the layer's dtype.

        Returns:
            [T, H].
        """
        rows = self._expert_rows(batch, rows)
        state = batch.state
        if type(state) is Decoded:
            return self._transport.decode_combine(rows, state, False)[0]
        return self._prefill_combine(rows, state, False, [])

    def combine_async(self, batch: ExpertBatch, rows: Tensor) -> Pending[Tensor]:
        """combine in two halves. See Pending."""
        rows = self._expert_rows(batch, rows)
        state = batch.state
        if type(state) is Decoded:
            combined, hook = self._transport.decode_combine(rows, state, True)
            assert hook is not None
            return Pending(_after(hook, combined))
        events: list[Any] = []
        combined = self._prefill_combine(rows, state, True, events)
        return Pending(_after(events[0].current_stream_wait, combined))

    # ---- steps ---------------------------------------------------------------------------------

    def _way(self, x: Tensor, mode: Mode | None, bounded: bool) -> str:
        """One of "prefill", "decode", "learn" (prefill that tells the rule), "ask" (decode)."""
        shape = self.shape
        num_tokens = self._check(x)
        if mode is None:
            mode = self.mode
        elif mode not in MODES:
            raise ArgumentError("mode", mode, f"must be one of {', '.join(MODES)}")
        if mode == "auto":
            if bounded:
                raise ArgumentError("bounded", True, 'needs mode="prefill": "auto" wants counts')
            if not self._can_decode or torch.is_grad_enabled():
                return "learn"
            if shape.may_exceed and not self._is_capturing():
                return "ask" if self.rule.begins_with_decode else "learn"
            mode = "decode"
        if mode == "prefill":
            return "prefill"
        if num_tokens > shape.decode_tokens:
            raise ArgumentError(
                "x", f"{num_tokens} tokens", f"must have at most {shape.decode_tokens} "
                "(decode_tokens) in a decode step or in a captured one",
            )  # fmt: skip
        if not self._can_decode:
            raise ArgumentError("mode", mode, "needs a layer that is built for it")
        return "decode"

    def _check(self, x: Tensor) -> int:
        shape = self.shape
        if x.dim() != 2 or x.shape[1] != shape.hidden or x.dtype != shape.dtype:
            raise ArgumentError(
                "x",
                f"{list(x.shape)} of {x.dtype}",
                f"must be [T, {shape.hidden}] of {shape.dtype}",
            )
        num_tokens = x.shape[0]
        if num_tokens > shape.max_tokens:
            raise ArgumentError(
                "x", f"{num_tokens} tokens", f"must have at most {shape.max_tokens} (max_tokens)"
            )
        return num_tokens

    def _needs_grad(self, x: Tensor, topk_weights: Tensor) -> bool:
        if not torch.is_grad_enabled() or not (x.requires_grad or topk_weights.requires_grad):
            return False
        if self.shape.fp8:
            raise ArgumentError("x", "a tensor that requires grad", "must not, with fp8=True")
        return True

    def _dispatch(
        self, way: str, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bounded: bool
    ) -> ExpertBatch:
        if way == "decode":
            return self._decode(x, topk_idx, topk_weights, False)[0]
        if way == "ask":
            batch = self._open(x, topk_idx, topk_weights, False)[0]
            if self.rule.learn(self.buffer.wait_low_latency_num_tokens()):
                return batch
            return self._prefill(x, topk_idx, topk_weights, False)
        batch = self._prefill(x, topk_idx, topk_weights, bounded or self._is_capturing())
        if way == "learn":
            self._learn()
        return batch

    def _dispatch_async(
        self, way: str, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bounded: bool
    ) -> Pending[ExpertBatch]:
        if way == "decode" or way == "ask":
            step = self._decode if way == "decode" else self._open
            batch, hook = step(x, topk_idx, topk_weights, True)
            assert hook is not None

            def receive() -> ExpertBatch:
                hook()
                if way == "decode" or self.rule.learn(self.buffer.wait_low_latency_num_tokens()):
                    return batch
                return self._prefill(x, topk_idx, topk_weights, False)

            return Pending(receive)
        finish = self._send(x, topk_idx, topk_weights, bounded or self._is_capturing(), True)

        def group() -> ExpertBatch:
            batch = finish()
            if way == "learn":
                self._learn()
            return batch

        return Pending(group)

    def _learn(self) -> None:
        if self._max_num_tokens is not None:  # None: bounded, while a graph is captured
            self.rule.learn(self._max_num_tokens)

    def _decode(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_async: bool
    ) -> tuple[ExpertBatch, Callable[[], None] | None]:
        if self._needs_grad(x, topk_weights):
            raise ArgumentError(
                "mode", "decode", "has no gradients: call under torch.no_grad(), or with prefill"
            )
        return self._transport.decode(x, topk_idx, topk_weights, is_asking=False, is_async=is_async)

    def _open(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_async: bool
    ) -> tuple[ExpertBatch, Callable[[], None] | None]:
        """A decode exchange that tells all ranks the most tokens; too many are not sent."""
        if x.shape[0] > self.shape.decode_tokens:
            x = x[: self.shape.decode_tokens + 1]
            nowhere = self._nowhere.get(topk_idx.dtype)
            topk_idx = topk_idx[: len(x)] if nowhere is None else nowhere  # refused by its name
            topk_weights = self._no_weights
        return self._transport.decode(x, topk_idx, topk_weights, is_asking=True, is_async=is_async)

    def _prefill(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_bounded: bool
    ) -> ExpertBatch:
        return self._send(x, topk_idx, topk_weights, is_bounded, False)()

    def _send(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_bounded: bool,
        is_async: bool,
    ) -> Callable[[], ExpertBatch]:
        """Sends now; the function returned receives and groups."""
        prefill = self._transport.prefill
        needs_grad = self._needs_grad(x, topk_weights)
        if needs_grad:
            out: list[Any] = []
            rows, weights = autograd.Dispatch.apply(
                x, topk_weights, topk_idx, prefill, is_bounded, is_async, out
            )
            sent = out[0]
        else:
            sent = prefill.send(
                x, topk_idx, topk_weights, is_bounded=is_bounded, is_async=is_async
            )

        def receive() -> ExpertBatch:
            if is_async:
                sent.event.current_stream_wait()
            if needs_grad:
                return self._batch(sent, rows, weights)
            prefill.receive(sent)
            return self._batch(sent, sent.x, sent.weights)

        return receive

    def _batch(self, sent: Sent, rows: Tensor, weights: Tensor) -> ExpertBatch:
        self._max_num_tokens = sent.max_num_tokens
        return self._transport.prefill_batch(sent, rows, weights)

    def _expert_rows(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        if rows.shape != batch.x.shape or rows.dtype != self.shape.dtype:
            raise ArgumentError(
                "rows", f"{list(rows.shape)} of {rows.dtype}",
                f"must be what experts made of the batch: {list(batch.x.shape)} of "
                f"{self.shape.dtype}",
            )  # fmt: skip
        return rows if rows.is_contiguous() else rows.contiguous()

    def _prefill_combine(
        self, rows: Tensor, state: Prefilled, is_async: bool, events: list[Any]
    ) -> Tensor:
        handle, weights, prefill = state.handle, state.weights, self._transport.prefill
        if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
            return autograd.Combine.apply(rows, weights, handle, prefill, is_async, events)
        combined, event = prefill.combine(rows, weights, handle, is_async)
        events.append(event)
        return combined


def _after(wait: Callable[[], None], value: Tensor) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        wait()
        return value

    return finish
