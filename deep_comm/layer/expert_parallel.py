"""ExpertParallel: a Mixture-of-Experts layer's communication at every batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from deep_comm import log
from deep_comm.backends import resolve_device
from deep_comm.buffer import Buffer
from deep_comm.context.shape import (
    MemoryEstimate,
    Mode,
    MoEShape,
    estimate_memory,
    preset_decode_tokens,
    require_mode,
)
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.layer import construction, ops
from deep_comm.layer.batch import ExpertBatch
from deep_comm.layer.mode import ModeRule
from deep_comm.layer.pending import Pending
from deep_comm.layer.steps import Experts, Steps
from deep_comm.ranks.rendezvous import Rendezvous

_SHOWN_CALLS = ("forward", "dispatch", "dispatch_async", "combine", "combine_async")


def _hooked(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def call(self: ExpertParallel, *args: Any, **options: Any) -> Any:
        self._has_hooks = True
        return register(self, *args, **options)

    return call


class ExpertParallel(torch.nn.Module):
    """Dispatch, experts, combine over one Buffer, for any number of tokens.

    ``experts(batch) -> rows`` gets an ExpertBatch. y[t] is the sum over k of topk_weights[t, k]
    times the row of expert topk_idx[t, k] for token t. One object serves all layers of a model that
    have this shape. Calls are collective: all ranks make the same calls in the same order, with
    whatever number of tokens each of them has, also none.

    **Mode.** "prefill" takes any number of tokens, and its host waits for counts. "decode" is for
    few tokens on every rank; its host does not wait, and CUDA graphs can hold it. "auto" takes
    decode for a step in which no rank has more than ``decode_tokens``, without asking the ranks
    first:

    * A step begins as the last one ended. Every exchange tells all ranks the most tokens that any
      of them had in it.
    * A prefill step takes any number of tokens.
    * In a decode step a rank with too many tokens says so instead of sending them. All ranks learn
      of it in that exchange and go on with a prefill step for it. The tokens of the other ranks
      have been served by then. So ``experts`` may be called twice in one ``forward``.

    While a CUDA graph is captured, and if max_tokens does not exceed decode_tokens, all steps are
    decode steps. If gradients are enabled (``torch.is_grad_enabled``) or rows are not bfloat16, all
    steps are prefill steps.

    **Bits.** Results are the same bits in either mode if ``experts`` computes a row the same way in
    both. Both modes add in the same order and round at the same places: a rank's rows of a token in
    float32, k ascending, to the dtype; those of the ranks in float32, ranks ascending, to the
    dtype. Between nodes the modes round differently: prefill adds and rounds a node's rows of a
    token before they cross (InternodeCalls), decode sends each rank's sum by itself.

    **As a module.** It is a torch.nn.Module without parameters: a part of a model, with hooks, an
    empty state dict and ``train()`` / ``eval()``, which change nothing. ``to()`` changes nothing
    either: it stays on the device of its Buffer. Copies of a model share it.

    Attributes:
        buffer: the Buffer that it uses.
        shape: MoEShape.
        mode: of calls that do not name one.
        memory: MemoryEstimate, in bytes; ``print(layer.memory)``.

    Examples:
        >>> with deep_comm.ExpertParallel(
        ...     group, hidden=H, num_experts=E, num_topk=K, max_tokens=64, device="cpu") as moe:
        ...     y = moe(x, topk_idx, topk_weights, lambda batch: batch.x * 2)
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
        """Build the layer. Collective over the group.

        All arguments except devices and timeouts must be equal on all ranks.

        Args:
            group: as of Buffer.
            hidden: H.
            num_experts: E.
            num_topk: K.
            max_tokens: the most tokens that a rank may have in a call.
            decode_tokens: M, the most that "decode" takes, and where "auto" ends decode. At most
                max_tokens. Default: DEEP_COMM_DECODE_TOKENS, else what was measured for such a
                layer on such a machine (``deep_comm bench --mode layer --store``), else
                128.
            mode: "auto", "prefill" or "decode".
            dtype: of tokens and results. Low-latency mode needs bfloat16.
            fp8: send tokens as float8_e4m3 with one scale per 128 columns. No gradients.
            expert_alignment: groups of prefill batches begin at multiples of it.
            max_recv_rows: rows of prefill batches with bounded counts, padding included: of calls
                with ``bounded=True`` and of captured ones. Default: enough for every selection of
                every rank to come here.
            buffer: use this Buffer instead of building one. It must be large enough, and is not
                destroyed with the layer.
            device, ranks_per_node, timeout_s, comm: of the Buffer to build.

        Raises:
            ArgumentError, UnsupportedError: on this rank.
            ConfigMismatch, TopologyError, PeerLost: on all ranks.
        """
        super().__init__()
        self._has_hooks = False
        is_named = decode_tokens is not None or mode == "prefill"
        if decode_tokens is None:
            decode_tokens = preset_decode_tokens(max_tokens)
        shape = MoEShape(hidden, num_experts, num_topk, max_tokens, decode_tokens, dtype, fp8)
        construction.check_options(shape, mode, expert_alignment, max_recv_rows)
        self.mode: Mode = mode
        self._owns_buffer = buffer is None
        if buffer is None:
            device = resolve_device(device)
            rendezvous = Rendezvous(group, comm).meet(timeout_s)
        elif isinstance(buffer, Buffer):
            device = buffer.device
            rendezvous = buffer._context.rendezvous.meet(timeout_s)
        else:
            raise ArgumentError("buffer", type(buffer).__name__, "must be a Buffer")
        self.shape = shape = construction.settle(shape, rendezvous, device, is_named)
        construction.require_alike(
            rendezvous, shape, mode, expert_alignment, max_recv_rows, ranks_per_node
        )
        if buffer is None:
            buffer = construction.build_buffer(
                shape, mode, group, comm, device, ranks_per_node, timeout_s
            )
        self.buffer = buffer
        num_ranks = buffer.group_size
        num_nodes = buffer._context.topology.num_nodes
        self.memory = estimate_memory(shape, num_ranks, mode, buffer.device.type, num_nodes)
        can_decode = shape.can_decode and mode != "prefill"
        if max_recv_rows is None:
            max_recv_rows = construction.most_rows(self.shape, num_ranks, expert_alignment)
        try:
            if can_decode:
                construction.require_decode(buffer, shape)
            self._steps = Steps(buffer, self.shape, expert_alignment, max_recv_rows, can_decode)
        except BaseException:
            self.destroy()
            raise
        self._key = ops.register(self)
        log.logger.info("%s is built over %s", repr(self), repr(buffer))
        log.show_calls(self, buffer.rank, _SHOWN_CALLS, buffer.stats)

    def extra_repr(self) -> str:
        shape = self.shape
        return (
            f"hidden={shape.hidden}, num_experts={shape.num_experts}, num_topk={shape.num_topk}, "
            f"max_tokens={shape.max_tokens}, mode={self.mode!r}, device={self.buffer.device}"
        )

    @property
    def rule(self) -> ModeRule:
        """The state of "auto"; the same on all ranks."""
        return self._steps.rule

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
        ranks_per_node: int | None = None,
    ) -> MemoryEstimate:
        """Return what a layer will take on every rank, in bytes, before it is built.

        Local. Arguments as of the constructor.

        Args:
            num_ranks: R.
            device_type: "cuda", or "cpu" for the host target.
            ranks_per_node: a divisor of R. Default: all on one node, or as many as one can hold.

        Raises:
            ArgumentError: a size is out of range, or a mode or device type is none.

        Examples:
            >>> estimate = deep_comm.ExpertParallel.estimate_memory(
            ...     8, hidden=7168, num_experts=256, num_topk=8, max_tokens=4096)
            >>> num_bytes = estimate.total
        """
        if decode_tokens is None:
            decode_tokens = preset_decode_tokens(max_tokens)
        shape = MoEShape(hidden, num_experts, num_topk, max_tokens, decode_tokens, dtype, fp8)
        require_mode(mode, shape)
        if device_type not in ("cuda", "cpu"):
            raise ArgumentError("device_type", device_type, "must be cuda or cpu")
        num_nodes = construction.num_nodes_of(num_ranks, ranks_per_node)
        return estimate_memory(shape, num_ranks, mode, device_type, num_nodes)

    def destroy(self) -> None:
        """Free the Buffer, if the layer has built it. Idempotent. Waits for no peer."""
        if self._owns_buffer:
            self.buffer.destroy()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.destroy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Share the layer: its memory cannot be copied."""
        return self

    def __copy__(self) -> ExpertParallel:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UnsupportedError(
            "an ExpertParallel cannot be pickled, as its memory is shared with its peers: save the "
            "model's state_dict(), and build the layer where it is loaded"
        )

    def reset(self, *, without: Iterable[int] = ()) -> None:
        """After a PeerTimeout: reset the Buffer, and begin "auto" anew. Collective.

        Args:
            without: ranks to go on without, as of Buffer.reset. Only for layers in mode "prefill".

        Raises:
            UnsupportedError: ``without`` and a layer that decodes. Others as of Buffer.reset.

        Examples:
            >>> layer.reset()
        """
        named = tuple(without)
        if named and self._steps.can_decode:
            raise UnsupportedError(
                'only layers in mode "prefill" go on without ranks; decode steps, and the choice '
                'of "auto", need all of them'
            )
        self.buffer.reset(without=named)
        if not named:
            self._steps.begin_anew()

    # ---- operations ----------------------------------------------------------------------------

    # A module looks for hooks in every call, which takes longer than a call of forward.
    register_forward_hook = _hooked(torch.nn.Module.register_forward_hook)
    register_forward_pre_hook = _hooked(torch.nn.Module.register_forward_pre_hook)
    register_full_backward_hook = _hooked(torch.nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _hooked(torch.nn.Module.register_full_backward_pre_hook)

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
        """Do what forward does, with the hooks that were registered here."""
        call = super().__call__ if self._has_hooks else self.forward
        y: Tensor = call(
            x, topk_idx, topk_weights, experts, shared=shared, mode=mode, bounded=bounded
        )
        return y

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
            x: [T, H] of the layer's dtype; contiguous, as the next two.
            topk_idx: int64 or int32 [T, K], global expert indices; -1: no selection.
            topk_weights: float32 [T, K].
            experts: gets an ExpertBatch, returns rows of the shape of its x, of the layer's dtype.
            shared: computed on x while tokens travel, and added to the result.
            mode: for this call; then equal on all ranks.
            bounded: prefill without a host wait, in batches of max_recv_rows rows.

        Returns:
            [T, H] of the dtype of x.

        Raises:
            ArgumentError, BufferTooSmall: nothing was launched.
            ConfigMismatch, ExpertIndexError, CapacityError, PeerTimeout, MaskedOut: as of Buffer's
                dispatch; in decode steps as of low_latency_dispatch, so that ExpertIndexError is of
                the rank with the bad index alone.

        Examples:
            >>> def experts(batch):
            ...     return batch.map(lambda expert, rows: rows * (expert + 1))
            >>> y = layer(x, topk_idx, topk_weights, experts, shared=lambda rows: rows / 2)
        """
        if is_compiling():
            y = ops.traced_forward(self, x, topk_idx, topk_weights, experts, mode, bounded)
            return y if shared is None else y + shared(x)
        steps = self._steps
        way = steps.way(self.mode if mode is None else mode, bounded)
        if way == "ask":
            return steps.ask(x, topk_idx, topk_weights, experts, shared)
        if shared is None:
            batch = steps.dispatch(way, x, topk_idx, topk_weights, bounded)
            return steps.combine(batch, experts(batch))
        with steps.dispatch_async(way, x, topk_idx, topk_weights, bounded) as sent:
            y_shared = shared(x)
        batch = sent.result()
        return steps.combine(batch, experts(batch)) + y_shared

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        mode: Mode | None = None,
        bounded: bool = False,
    ) -> ExpertBatch:
        """Return the rows for this rank's experts. Collective; arguments and errors as of forward.

        With "auto" the host waits until the exchange has told how many tokens there are; forward
        need not. In a step in which ranks disagree about the mode, all use dispatch, or all
        forward.

        Examples:
            >>> batch = layer.dispatch(x, topk_idx, topk_weights)
            >>> y = layer.combine(batch, batch.x * 2)
        """
        steps = self._steps
        way = steps.way(self.mode if mode is None else mode, bounded)
        return steps.dispatch(way, x, topk_idx, topk_weights, bounded)

    def dispatch_async(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        mode: Mode | None = None,
        bounded: bool = False,
    ) -> Pending[ExpertBatch]:
        """Send now, and receive in ``result()``. Collective; see Pending.

        Arguments and errors as of forward; errors of the exchange are raised by ``result()``.

        Examples:
            >>> with layer.dispatch_async(x, topk_idx, topk_weights) as sent:
            ...     shared = x / 2  # while rows travel
            >>> batch = sent.result()
            >>> y = layer.combine(batch, batch.x * 2) + shared
        """
        steps = self._steps
        way = steps.way(self.mode if mode is None else mode, bounded)
        return steps.dispatch_async(way, x, topk_idx, topk_weights, bounded)

    def combine(self, batch: ExpertBatch, rows: Tensor) -> Tensor:
        """Return the weighted sums of the experts' rows, at the tokens' ranks. Collective.

        Args:
            batch: of dispatch.
            rows: what the experts made of batch.x: its shape, the layer's dtype.

        Returns:
            [T, H] of the layer's dtype.

        Raises:
            ArgumentError, HandleMismatch: nothing was launched.
            ConfigMismatch, PeerTimeout: as of Buffer's combine.

        Examples:
            >>> batch = layer.dispatch(x, topk_idx, topk_weights)
            >>> y = layer.combine(batch, batch.x * 2)
        """
        return self._steps.combine(batch, rows)

    def combine_async(self, batch: ExpertBatch, rows: Tensor) -> Pending[Tensor]:
        """Send now, and receive in ``result()``. Collective; see Pending. As combine otherwise.

        Examples:
            >>> batch = layer.dispatch(x, topk_idx, topk_weights)
            >>> with layer.combine_async(batch, batch.x * 2) as returning:
            ...     shared = x / 2  # while sums travel
            >>> y = returning.result() + shared
        """
        return self._steps.combine_async(batch, rows)
