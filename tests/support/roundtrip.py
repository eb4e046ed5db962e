"""Run a case of one tier or two on every rank, and check what came out against the reference, bit
for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import forked
import payload
import torch
from cases import Case, Inputs, InternodeCase, make_inputs, verify_each
from torch import Tensor

import deep_comm
from deep_comm import local, reference
from deep_comm.reference import internode as reference_internode

# Whether a rank makes its inputs and leaves its results on its device, where they are checked.
_stays: ContextVar[bool] = ContextVar("stays", default=False)


@contextlib.contextmanager
def results_stay() -> Iterator[None]:
    """In it calls make inputs on their device, and what they return for a check stays there. For
    ranks that check in their own process: copies to the host and one thread of it take seconds
    where rows are many and long.
    """
    token = _stays.set(True)
    try:
        yield
    finally:
        _stays.reset(token)


def made_for(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where inputs are made: on the host, or on ``device`` in :func:`results_stay`."""
    return device if _stays.get() else contextlib.nullcontext()


@dataclass(frozen=True)
class Received:
    """What one rank got out of one call; tensors on the host, but see :func:`results_stay`."""

    recv_x: Tensor
    recv_scales: Tensor | None
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor | None
    counts: list[int]
    num_tokens_per_node: Tensor | None  # of the layout, between nodes
    handle: dict[str, Tensor]
    cached_x: Tensor  # a second dispatch with the handle, payload of call + CACHED_CALL
    cached_bytes: list[list[int]]  # that it has put on the rail, by node and queue
    combined_x: Tensor
    combined_weights: Tensor | None


T = TypeVar("T")
Steps = Generator[None, None, T]
"""Calls of one rank, which stops between them; then their result."""


def completed(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


# The cached dispatch of a call carries a payload of its own, or a stale ring would look right.
CACHED_CALL = 512

ONE_TIER_FIELDS = (
    "is_token_in_rank", "rank_prefix_matrix", "channel_prefix_matrix", "recv_channel_prefix_matrix",
    "recv_src_idx",
)  # fmt: skip
TWO_TIER_FIELDS = (
    "is_token_in_rank", "rdma_channel_prefix_matrix", "gbl_channel_prefix_matrix",
    "recv_rdma_channel_prefix_matrix", "recv_rdma_rank_prefix_sum",
    "recv_gbl_channel_prefix_matrix", "recv_gbl_rank_prefix_sum", "send_rdma_head",
)  # fmt: skip
DEVICE_COUNTS = (
    "num_recv_tokens_tensor",
    "num_recv_tokens_per_rank",
    "num_recv_tokens_per_expert",
)
HANDLE_FIELDS = {
    False: (*ONE_TIER_FIELDS, "send_head", *DEVICE_COUNTS),
    True: (*TWO_TIER_FIELDS, "recv_src_idx", "recv_src_meta", "send_nvl_head", *DEVICE_COUNTS),
}
"""Of a handle between nodes, or not."""


def num_channels_of(received: Received) -> int:
    name = "channel_prefix_matrix"
    return received.handle[name if name in received.handle else f"rdma_{name}"].shape[1]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        # Strided scales must keep their strides on the way to a device.
        if value.device.type == device.type:
            return value
        _settle()
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    return value


def source_ranks(handle: Any, rank: int, num_rows: int) -> Tensor:
    """Source rank of every row that ``rank`` received (the last rank's past the end)."""
    if isinstance(handle, deep_comm.InternodeHandle):
        ends = _to_host(handle.recv_gbl_rank_prefix_sum).long()
    else:
        ends = _to_host(handle.rank_prefix_matrix[:, rank].long())
    return torch.searchsorted(ends, torch.arange(num_rows), right=True).clamp(max=len(ends) - 1)


def expert_outputs(
    case: Case, recv_src_rank: Tensor, recv_src_idx: Tensor, rank: int, call: int
) -> Tensor:
    return payload.summands(
        recv_src_rank, recv_src_idx, rank, case.hidden, case.combine_dtype, call
    )


@dataclass(frozen=True)
class Given:
    """What one rank gives to one call, on its device."""

    x: Any  # with scales a pair
    again: Any  # for the cached dispatch
    topk_idx: Tensor
    topk_weights: Tensor | None
    bias: Any

    @classmethod
    def to(cls, buffer: deep_comm.Buffer, case: Case, call: int) -> Given:
        rank, device = buffer.rank, buffer.device
        with made_for(device):
            inputs = make_inputs(case, rank, call)
            again = payload.rows(
                rank, case.tokens[rank], case.hidden, case.dtype, call + CACHED_CALL
            )
        xs = _to((inputs.x, again), device)
        if inputs.scales is not None:
            scales = _to(inputs.scales, device)
            xs = ((xs[0], scales), (xs[1], scales))
        return cls(*xs, *_to((inputs.topk_idx, inputs.topk_weights, inputs.bias), device))


def parts_of(recv: Any) -> tuple[Tensor, Tensor | None]:
    """(rows, scales)"""
    return recv if isinstance(recv, tuple) else (recv, None)


def routing_arguments(
    buffer: deep_comm.Buffer, case: Case, given: Given, options: dict
) -> dict[str, Any]:
    """Of dispatch: with a layout, or with what it takes to make one."""
    arguments: dict[str, Any] = dict(topk_idx=given.topk_idx, topk_weights=given.topk_weights)
    if case.fused_layout:
        return arguments | {"num_experts": case.experts}
    per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(
        given.topk_idx, case.experts, **options
    )
    _wait(event)
    return arguments | dict(
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
    )


def rail_bytes(buffer: deep_comm.Buffer) -> list[list[int]]:
    """Put so far, by node and queue; [] inside a node. On CUDA kernels have ended then, and the NIC
    has taken all.
    """
    if buffer.num_nodes > 1 and buffer.device.type == "cuda":
        torch.cuda.synchronize()
        buffer.runtime.quiet_rail()
    return buffer.rail_put_bytes


def bytes_since(before: list[list[int]], buffer: deep_comm.Buffer) -> list[list[int]]:
    return [
        [later - earlier for later, earlier in zip(*queues, strict=True)]
        for queues in zip(rail_bytes(buffer), before, strict=True)
    ]


def require_described(case: Case, handle: Any, rank: int, recv_x: Tensor) -> None:
    """What a handle says of its dispatch, beside the tensors."""
    shape = handle.rank, handle.num_experts, handle.num_topk, handle.num_tokens
    assert shape == (rank, case.experts, case.topk, case.tokens[rank])
    is_counted = case.num_worst_tokens == 0
    counts = handle.num_recv_tokens, handle.max_num_tokens
    assert counts == ((len(recv_x), max(case.tokens)) if is_counted else (None, None))
    assert handle.num_recv_rows == handle.num_output_rows == len(recv_x)
    assert recv_x.is_contiguous()
    if isinstance(case, InternodeCase):
        assert (handle.num_returning_rows is not None) == is_counted
        assert (handle.num_nodes, handle.num_ranks) == (case.num_nodes, case.num_ranks)


def call_in_steps(
    buffer: deep_comm.Buffer, case: Case, call: int, options: dict | None = None
) -> Steps[Received]:
    """Layout, dispatch, cached dispatch, combine of one rank, with a stop after each call.
    ``options``: stream arguments.
    """
    rank, config = buffer.rank, case.config()
    options = dict(options or {})
    given = Given.to(buffer, case, call)
    arguments = routing_arguments(buffer, case, given, options)
    recv, recv_topk_idx, recv_weights, counts, handle, event = buffer.dispatch(
        given.x, **arguments, expert_alignment=case.alignment,
        num_worst_tokens=case.num_worst_tokens, zero_tail=case.zero_tail, config=config, **options,
    )  # fmt: skip
    _wait(event)
    yield
    recv_x, recv_scales = parts_of(recv)
    received = [_as_it_is(part) for part in (recv_x, recv_scales, recv_topk_idx, recv_weights)]
    require_described(case, handle, rank, recv_x)
    assert (event.event is not None) == bool(options.get("async_finish"))
    is_internode = isinstance(handle, deep_comm.InternodeHandle)
    before = rail_bytes(buffer)
    cached, *nothing, event = buffer.dispatch(
        given.again, handle=tuple(handle) if is_internode else handle, config=config, **options
    )
    _wait(event)
    cached_x = _as_it_is(parts_of(cached)[0])
    cached_bytes = bytes_since(before, buffer)
    assert nothing == [None, None, None, None]
    yield
    with made_for(buffer.device):
        src_rank = source_ranks(handle, rank, recv_x.shape[0])
        outputs = expert_outputs(case, src_rank, _to_host(handle.recv_src_idx), rank, call)
    y = _to(outputs, buffer.device)
    combined_x, combined_weights, event = buffer.combine(
        y, handle, topk_weights=recv_weights, bias=given.bias, config=config,
        topk_idx=given.topk_idx if case.by_selections else None, **options,
    )  # fmt: skip
    _wait(event)
    yield
    per_node = arguments.get("num_tokens_per_rdma_rank")
    return Received(
        recv_x=_to_host(received[0]), recv_scales=_to_host_if(received[1]),
        recv_topk_idx=_to_host(received[2]), recv_topk_weights=_to_host_if(received[3]),
        counts=list(counts), num_tokens_per_node=_to_host_if(per_node),
        handle={name: _to_host(getattr(handle, name)) for name in HANDLE_FIELDS[is_internode]},
        cached_x=_to_host(cached_x), cached_bytes=cached_bytes, combined_x=_to_host(combined_x),
        combined_weights=_to_host_if(combined_weights),
    )  # fmt: skip


def call_once(*given: Any) -> Received:
    """All steps at once; arguments as of call_in_steps."""
    return completed(call_in_steps(*given))


def _settle() -> None:
    """On CUDA, before a copy from or to ordinary host memory: the driver lets one such copy wait at
    a time, so that ranks that are threads would wait for each other's kernels.
    """
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _as_it_is(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """On the host target, after a call and before the next: a copy, which a peer whose kernel has
    not ended cannot complete. A copy from a device would part the calls of a stream.
    """
    return tensor.clone() if tensor is not None and tensor.device.type == "cpu" else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """What neither a later call may change, nor a peer whose kernel has not ended yet."""
    if _stays.get() or tensor.device.type == "cpu":
        return tensor.clone()
    _settle()
    return tensor.cpu()


def _to_host_if(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _to_host(tensor)


def _wait(event: deep_comm.EventOverlap) -> None:
    if event.event is not None:
        event.current_stream_wait()


def buffer_of(
    group: Any, case: Case, device: torch.device | str, timeout_s: float = 60.0
) -> deep_comm.Buffer:
    return deep_comm.Buffer(group, device=device, timeout_s=timeout_s, **case.buffer_arguments())


def run_calls(
    group: Any,
    case: Case,
    device: torch.device | str,
    call_once: Callable[[deep_comm.Buffer, int], T],
    timeout_s: float = 60.0,
) -> list[T]:
    """``call_once(buffer, call)`` for all calls of a case on one rank."""
    with buffer_of(group, case, device, timeout_s) as buffer:
        if case.smem_bytes is not None:
            buffer.runtime.smem_bytes_limit = case.smem_bytes
        return [call_once(buffer, call) for call in range(case.calls)]


def run_case(
    group: Any,
    case: Case,
    device: torch.device | str = "cpu",
    options: dict | None = None,
    timeout_s: float = 60.0,
) -> list[Received]:
    """All calls of a case on one rank."""
    one = lambda buffer, call: call_once(buffer, case, call, options)
    return run_calls(group, case, device, one, timeout_s)


def verify(case: Case, results: Sequence[Sequence[Received | None]]) -> None:
    """``results[rank][call]`` against the reference; None: another process checks that rank, or it
    is absent.
    """
    for call in range(case.calls):
        verify_call(case, [calls[call] for calls in results], call)


def check(
    case: Any,
    *,
    run_case: Callable[..., Any] = run_case,
    verify: Callable[[Any, Any], None] = verify,
) -> None:
    """All calls of a case on ranks that are threads, verified. ``run_case``, ``verify``: of another
    kind of call."""
    verify(case, local.run(lambda group: run_case(group, case), case.num_ranks, timeout_s=120))


def _run_all(group: Any, run_case: Callable[..., Any], cases: Sequence[Any]) -> list[Any]:
    return [run_case(group, case) for case in cases]


def check_processes(
    cases: Sequence[Any], *, run_case: Callable[..., Any], verify: Callable[[Any, Any], None]
) -> None:
    """The same of cases of equally many ranks, which are processes."""
    results = forked.run(_run_all, cases[0].num_ranks, run_case, cases, timeout_s=120)
    verify_each(verify, cases, results)


def verify_call(case: Case, received: Sequence[Received | None], call: int) -> None:
    same = payload.assert_same_bits
    inputs = [make_inputs(case, rank, call) for rank in range(case.num_ranks)]
    num_channels = next(num_channels_of(got) for got in received if got is not None)
    expected: Any = dispatched_by_reference(
        case, inputs, num_channels=num_channels, expert_alignment=case.alignment,
        num_worst_tokens=case.num_worst_tokens,
    )  # fmt: skip
    is_internode = isinstance(case, InternodeCase)
    wanted = [want.received if is_internode else want for want in expected]
    outputs = [
        expert_outputs(case, want.recv_src_rank.clamp(min=0), want.recv_src_idx, rank, call)
        for rank, want in enumerate(wanted)
    ]
    combined = combined_by_reference(
        case, outputs, expected,
        [want.recv_topk_weights for want in wanted] if case.has_weights else None,
        [i.bias for i in inputs],
        [i.topk_idx for i in inputs] if case.by_selections else None,
        case.experts,
    )  # fmt: skip
    for rank, (got, want) in enumerate(zip(received, wanted, strict=True)):
        if got is None:
            continue
        who = f"rank {rank} call {call}"
        verify_payload(case, got, want, who)
        verify_device_counts(case, got, want, who)
        if isinstance(case, InternodeCase):
            verify_two_tier_handle(got, expected[rank], who)
            verify_bytes(case, got.cached_bytes, expected[rank], rank)
        else:
            for name in ONE_TIER_FIELDS:
                same(got.handle[name], getattr(want, name), f"{who}: handle.{name}")
            sent, heads = want.send_head >= 0, got.handle["send_head"]
            same(heads[sent], want.send_head[sent], f"{who}: handle.send_head")
            assert (heads[~sent] < 0).all()
        rows = cached_rows(case, want, call)
        same(got.cached_x[: want.num_recv_tokens], rows, f"{who}: cached recv_x")
        same(got.combined_x, combined[rank][0], f"{who}: combined_x")
        same_if_any(got.combined_weights, combined[rank][1], f"{who}: combined weights")


def same_if_any(got: Tensor | None, want: Tensor | None, what: str) -> None:
    assert (got is None) == (want is None), what
    if got is not None and want is not None:
        payload.assert_same_bits(got, want, what)


def dispatched_by_reference(
    case: Case, inputs: Sequence[Inputs], xs: Sequence[Any] | None = None, **options: Any
) -> list[Any]:
    """Of the tiers that the case has. ``xs``: instead of the inputs' rows and scales."""
    if xs is None:
        xs = [i.x if i.scales is None else (i.x, i.scales) for i in inputs]
    idx = [i.topk_idx for i in inputs]
    weights = [i.topk_weights for i in inputs] if case.has_weights else None
    if isinstance(case, InternodeCase):
        return reference_internode.dispatch(
            xs, idx, case.experts, case.ranks_per_node, weights, **options
        )
    return reference.dispatch(xs, idx, case.experts, weights, **options)


def combined_by_reference(case: Case, *given: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Between nodes sums are rounded once a node more."""
    tiers: Any = reference_internode if isinstance(case, InternodeCase) else reference
    return tiers.combine(*given)


def cached_rows(case: Case, want: reference.Dispatched, call: int) -> Tensor:
    """What a rank receives in the cached dispatch of a call."""
    num = want.num_recv_tokens
    tokens, sources = want.recv_src_idx[:num].long(), want.recv_src_rank[:num]
    rows = [
        payload.rows(peer, num_tokens, case.hidden, case.dtype, call + CACHED_CALL).view(
            torch.uint8
        )[tokens[sources == peer]]  # torch cannot index every dtype
        for peer, num_tokens in enumerate(case.tokens)
    ]
    return torch.cat(rows).view(case.dtype)


def verify_payload(case: Case, got: Any, want: reference.Dispatched, who: str) -> None:
    """What dispatch returned beside the handle."""
    same = payload.assert_same_bits
    num = want.num_recv_tokens
    assert got.recv_x.shape[0] == (case.num_worst_tokens or num), f"{who}: rows"
    same(got.recv_x[:num], want.recv_x[:num], f"{who}: recv_x")
    if want.recv_x_scales is not None:
        assert got.recv_scales is not None and got.recv_scales.is_contiguous()
        same(got.recv_scales[:num], want.recv_x_scales[:num], f"{who}: recv_x_scales")
    # Indices, weights and source indices are promised for the whole tensor, received or not.
    same(got.recv_topk_idx, want.recv_topk_idx, f"{who}: recv_topk_idx")
    same_if_any(got.recv_topk_weights, want.recv_topk_weights, f"{who}: recv_topk_weights")
    assert got.counts == want.num_recv_tokens_per_expert, f"{who}: {got.counts} tokens per expert"
    if case.zero_tail and case.num_worst_tokens:
        for tail in (
            got.recv_x[num:],
            got.recv_scales[num:] if got.recv_scales is not None else None,
        ):
            assert tail is None or not tail.view(torch.uint8).any(), f"{who}: the tail is not zero"


def verify_device_counts(case: Case, got: Received, want: reference.Dispatched, who: str) -> None:
    by_source = torch.bincount(want.recv_src_rank[: want.num_recv_tokens], minlength=case.num_ranks)
    assert got.handle["num_recv_tokens_tensor"].tolist() == [want.num_recv_tokens], who
    assert got.handle["num_recv_tokens_per_rank"].tolist() == by_source.tolist(), who
    idx = want.recv_topk_idx[: want.num_recv_tokens]
    per_expert = got.handle["num_recv_tokens_per_expert"]
    counted = torch.bincount(idx[idx >= 0].long(), minlength=len(per_expert))
    aligned = -(-counted // case.alignment) * case.alignment
    assert per_expert.tolist() == aligned.tolist(), who


def verify_two_tier_handle(
    got: Received, want: reference_internode.InternodeDispatched, who: str
) -> None:
    same, handle = payload.assert_same_bits, got.handle
    num, num_forward = want.received.num_recv_tokens, want.send_nvl_head.shape[0]
    for name in TWO_TIER_FIELDS:
        wanted = want.received if name == "is_token_in_rank" else want
        same(handle[name], getattr(wanted, name), f"{who}: handle.{name}")
    same(handle["recv_src_idx"], want.received.recv_src_idx, f"{who}: recv_src_idx")
    meta = handle["recv_src_meta"][:num].view(torch.int32)
    same(meta, want.recv_src_meta, f"{who}: handle.recv_src_meta")
    heads = handle["send_nvl_head"]
    same(heads[:num_forward], want.send_nvl_head, f"{who}: handle.send_nvl_head")
    assert (heads[num_forward:] == -1).all()
    if got.num_tokens_per_node is not None:
        sent = want.rdma_channel_prefix_matrix[:, -1].contiguous()
        same(got.num_tokens_per_node, sent, f"{who}: num_tokens_per_rdma_rank")


def slot_bytes(case: InternodeCase, num_topk: int) -> int:
    """A row on its way in dispatch, with all that travels beside it."""
    if case.is_direct:
        scales = 0 if case.scales is None else case.scales.num * case.scales.dtype.itemsize
        meta = -(-scales // 4) * 4 + 8 * num_topk + 4 + 4 * case.ranks_per_node
        return -(-meta // 128) * 128 + -(-case.hidden * case.dtype.itemsize // 128) * 128
    scales = 0 if case.scales is None else case.scales.num * case.scales.dtype.itemsize
    meta = -(-scales // 4) * 4 + 8 * num_topk + 4 + 4
    row = case.hidden * case.dtype.itemsize + -(-meta // 16) * 16
    return -(-row // 128) * 128


def verify_bytes(
    case: InternodeCase,
    cached_bytes: Sequence[Sequence[int]],
    want: reference_internode.InternodeDispatched,
    rank: int,
) -> None:
    """A cached dispatch puts exactly one row per (token, remote node),
    and none for the own node.
    """
    sent = want.rdma_channel_prefix_matrix[:, -1].tolist()
    for node, queues in enumerate(cached_bytes):
        is_own = node == rank // case.ranks_per_node
        rows = 0 if is_own else sent[node]
        assert sum(queues) == rows * slot_bytes(case, 0), f"rank {rank} to node {node}: {queues}"
