"""Two-tier cases: run one on every rank, and check what came out against
the reference, bit for bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matrix
import payload
import torch
from cases import Case, make_inputs
from roundtrip import (
    CACHED_CALL,
    Steps,
    _to,
    _to_host,
    _wait,
    cached_rows,
    completed,
    expert_outputs,
    made_for,
    routing_arguments,
    verify_payload,
)
from torch import Tensor

import deep_comm
from deep_comm import local
from deep_comm.reference import internode as reference

# (nodes, ranks per node); one node takes the single-tier path and has tests of its own.
SHAPES = [(2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (2, 1), (3, 2), (2, 3)]

ROUTINGS = ("random", "random", "skewed", "holes", "one_expert", "none", "duplicates")

HANDLE_FIELDS = (
    "rdma_channel_prefix_matrix",
    "gbl_channel_prefix_matrix",
    "recv_rdma_channel_prefix_matrix",
    "recv_rdma_rank_prefix_sum",
    "recv_gbl_channel_prefix_matrix",
    "recv_gbl_rank_prefix_sum",
    "send_rdma_head",
)


@dataclass(frozen=True)
class InternodeCase(Case):
    """A case of ``len(tokens)`` ranks, ``ranks_per_node`` to a logical node."""

    ranks_per_node: int = 2
    rail_chunk: int = 2
    rail_slots: int = 4
    rdma_bytes: int = 16 << 20
    num_qps: int = 4
    is_direct: bool = False  # every row must have had a place of its own, no ring been used

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def __str__(self) -> str:
        shape = f"{self.num_nodes}x{self.ranks_per_node}-"
        rail = f"-rail{self.rail_slots}by{self.rail_chunk}q{self.num_qps}"
        direct = "-direct" if self.is_direct else ""
        return shape + super().__str__() + (rail if self.num_sms is not None else "") + direct


def direct(case: InternodeCase) -> InternodeCase:
    """The same with a place for every row."""
    return dataclasses.replace(case, direct_bytes=case.nvl_bytes // 2, is_direct=True)


def random_case(seed: int, shape: tuple[int, int] | None = None) -> InternodeCase:
    """A case that follows from the seed; ``shape``: (nodes, ranks per node)."""
    choose = random.Random(seed)
    num_nodes, ranks_per_node = SHAPES[seed % len(SHAPES)] if shape is None else shape
    load = choose.choice(list(matrix.TOKENS.values()))
    num_ranks = num_nodes * ranks_per_node
    slots, rail_slots = choose.choice((1, 2, 5, 16)), choose.choice((2, 3, 8, 24))
    dtype, scales = choose.choice(matrix.PAYLOADS)
    return InternodeCase(
        tuple(min(40, load(rank, num_ranks)) for rank in range(num_ranks)),
        hidden=choose.choice((16, 80, 128)),
        experts=choose.choice((num_ranks, 2 * num_ranks + 3, 64, 3)),
        topk=choose.choice((1, 2, 5, 8)),
        dtype=dtype,
        combine_dtype=choose.choice((torch.bfloat16, torch.float16, torch.float32)),
        routing=choose.choice(ROUTINGS),
        idx_dtype=choose.choice((torch.int64, torch.int32)),
        scales=scales,
        num_sms=choose.choice((None, 2, 4, 6)),
        send_chunk=choose.randint(1, slots),
        slots=slots,
        rail_chunk=choose.randint(1, rail_slots // 2),
        rail_slots=rail_slots,
        num_qps=choose.choice((1, 2, 3, 24)),
        alignment=choose.choice((1, 1, 8)),
        worst=choose.choice((0, 0, 3)),
        zero_tail=choose.choice((False, True)),
        biases=choose.choice((0, 1, 2)),
        fused_layout=choose.choice((False, True)),
        calls=choose.choice((1, 2)),
        ranks_per_node=ranks_per_node,
        seed=seed,
    )


@dataclass(frozen=True)
class Received:
    """What one rank got out of one call; tensors on the host, but see roundtrip.results_stay."""

    recv_x: Tensor
    recv_scales: Tensor | None
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor
    counts: list[int]
    num_tokens_per_node: Tensor | None
    handle: deep_comm.InternodeHandle
    cached_x: (
        Tensor  # a second dispatch with the handle's ten tensors, payload of call + CACHED_CALL
    )
    cached_bytes: list[list[int]]  # that it has put on the rail, by node and queue
    combined_x: Tensor
    combined_weights: Tensor


def config_of(case: InternodeCase) -> deep_comm.Config | None:
    if case.num_sms is None:
        return None
    return deep_comm.Config(
        case.num_sms, case.send_chunk, case.slots, case.rail_chunk, case.rail_slots
    )


def source_ranks(handle: deep_comm.InternodeHandle, num_rows: int) -> Tensor:
    ends = _to_host(handle.recv_gbl_rank_prefix_sum).long()
    return torch.searchsorted(ends, torch.arange(num_rows), right=True).clamp(max=len(ends) - 1)


def call_in_steps(
    buffer: deep_comm.Buffer, case: InternodeCase, call: int, options: dict | None = None
) -> Steps[Received]:
    """Layout, dispatch, cached dispatch, combine of one rank, with a stop after each call.
    ``options``: stream arguments.
    """
    rank, config, device = buffer.rank, config_of(case), buffer.device
    options = dict(options or {})
    with made_for(device):
        inputs = make_inputs(case, rank, call)
        second = payload.rows(rank, case.tokens[rank], case.hidden, case.dtype, call + CACHED_CALL)
    x, scales = _to(inputs.x, device), _to(inputs.scales, device)
    topk_idx, weights = _to(inputs.topk_idx, device), _to(inputs.topk_weights, device)
    arguments = routing_arguments(buffer, case, topk_idx, weights, options)
    per_node = arguments.get("num_tokens_per_rdma_rank")
    recv, recv_topk_idx, recv_weights, counts, handle, event = buffer.dispatch(
        x if scales is None else (x, scales),
        **arguments,
        expert_alignment=case.alignment,
        num_worst_tokens=case.num_worst_tokens,
        zero_tail=case.zero_tail,
        config=config,
        **options,
    )
    _wait(event)
    yield
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)
    settle_rail(buffer)
    before = buffer.rail_put_bytes
    again = _to(second, device)
    cached, *nothing, event = buffer.dispatch(
        again if scales is None else (again, scales), handle=tuple(handle), config=config, **options
    )
    _wait(event)
    settle_rail(buffer)
    assert nothing == [None, None, None, None]
    cached_bytes = bytes_since(before, buffer.rail_put_bytes)
    assert cached_bytes is not None
    yield
    with made_for(device):
        src_rank = source_ranks(handle, recv_x.shape[0])
        outputs = expert_outputs(case, src_rank, _to_host(handle.recv_src_idx), rank, call)
    y = _to(outputs, device)
    combined_x, combined_weights, event = buffer.combine(
        y,
        handle,
        topk_weights=recv_weights,
        bias=_to(inputs.bias, device),
        config=config,
        **options,
    )
    _wait(event)
    yield
    return Received(
        recv_x=_to_host(recv_x),
        recv_scales=None if recv_scales is None else _to_host(recv_scales),
        recv_topk_idx=_to_host(recv_topk_idx),
        recv_topk_weights=_to_host(recv_weights),
        counts=list(counts),
        num_tokens_per_node=None if per_node is None else _to_host(per_node),
        handle=deep_comm.InternodeHandle(
            *(_to_host(part) for part in handle), recv_src_idx=_to_host(handle.recv_src_idx)
        ),
        cached_x=_to_host(cached[0] if isinstance(cached, tuple) else cached),
        cached_bytes=cached_bytes,
        combined_x=_to_host(combined_x),
        combined_weights=_to_host(combined_weights),
    )


def call_once(*given: Any) -> Received:
    """All steps at once; arguments as of call_in_steps."""
    return completed(call_in_steps(*given))


def bytes_since(
    before: list[list[int]] | None, now: list[list[int]] | None
) -> list[list[int]] | None:
    """What was put on the rail in between, by node and queue; None of one tier."""
    if before is None or now is None:
        return None
    return [
        [later - earlier for later, earlier in zip(*queues, strict=True)]
        for queues in zip(now, before, strict=True)
    ]


def settle_rail(buffer: deep_comm.Buffer) -> None:
    """On CUDA, before the counters of bytes are read: kernels have ended,
    and the NIC has taken all.
    """
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
        buffer.runtime.quiet_rail()


def run_case(
    group: Any,
    case: InternodeCase,
    timeout_s: float = 60.0,
    device: torch.device | str = "cpu",
    options: dict | None = None,
) -> list[Received]:
    """All calls of a case on one rank."""
    with deep_comm.Buffer(
        group,
        case.nvl_bytes,
        case.rdma_bytes,
        num_qps_per_rank=case.num_qps,
        device=device,
        timeout_s=timeout_s,
        ranks_per_node=case.ranks_per_node,
        num_max_experts=max(case.experts, 64),
        num_direct_bytes=case.direct_bytes,
    ) as buffer:
        return [call_once(buffer, case, call, options) for call in range(case.calls)]


def verify(case: InternodeCase, results: Sequence[Sequence[Received | None]]) -> None:
    """``results[rank][call]`` against the reference."""
    for call in range(case.calls):
        verify_call(case, [calls[call] for calls in results], call)


def hundred_calls(
    seed: int, num_nvl_bytes: int, worst: Sequence[int] = (0,), **options: Any
) -> None:
    """Cases of changing shapes on one Buffer of two nodes of two ranks, one call of each, checked.
    ``options``: of the Buffer; with num_direct_bytes outputs may lie in the receive region."""
    choose = random.Random(seed)
    cases = [
        InternodeCase(
            tuple(choose.choice((0, 1, 4, 13)) for _ in range(4)),
            hidden=choose.choice((16, 32, 256)),
            experts=choose.choice((4, 7, 12)),
            topk=choose.choice((1, 3)),
            num_sms=choose.choice((2, 4)),
            slots=choose.choice((1, 3)),
            send_chunk=1,
            rail_slots=choose.choice((2, 5)),
            rail_chunk=1,
            worst=choose.choice(worst),
            is_direct="num_direct_bytes" in options,
            seed=number,
        )
        for number in range(100)
    ]

    def fn(group: Any) -> list[Received]:
        with deep_comm.Buffer(
            group, num_nvl_bytes, 1 << 20, device="cpu", ranks_per_node=2, **options
        ) as buffer:
            return [call_once(buffer, case, 0) for case in cases]

    results = local.run(fn, 4, timeout_s=200)
    for number, case in enumerate(cases):
        verify(case, [[calls[number]] for calls in results])


def verify_call(case: InternodeCase, received: Sequence[Received | None], call: int) -> None:
    same = payload.assert_same_bits
    inputs = [make_inputs(case, rank, call) for rank in range(case.num_ranks)]
    num_channels = next(got.handle.num_channels for got in received if got is not None)
    expected = reference.dispatch(
        [i.x if i.scales is None else (i.x, i.scales) for i in inputs],
        [i.topk_idx for i in inputs],
        case.experts,
        case.ranks_per_node,
        [i.topk_weights for i in inputs],
        num_channels=num_channels,
        expert_alignment=case.alignment,
        num_worst_tokens=case.num_worst_tokens,
    )
    for rank, (got, want) in enumerate(zip(received, expected, strict=True)):
        if got is None:  # another process checks that rank
            continue
        who = f"rank {rank} call {call}"
        verify_payload(case, got, want.received, who)
        verify_handle(case, got, want, who)
        rows = cached_rows(case, want.received, call)
        same(got.cached_x[: want.received.num_recv_tokens], rows, f"{who}: cached recv_x")
        verify_bytes(case, got.cached_bytes, want, rank)
    outputs = [
        expert_outputs(
            case,
            want.received.recv_src_rank.clamp(min=0),
            want.received.recv_src_idx,
            rank,
            call,
        )
        for rank, want in enumerate(expected)
    ]
    combined = reference.combine(
        outputs,
        expected,
        [want.received.recv_topk_weights for want in expected],
        [i.bias for i in inputs],
    )
    for rank, (got, (want_x, want_weights)) in enumerate(zip(received, combined, strict=True)):
        if got is None:
            continue
        who = f"rank {rank} call {call}"
        same(got.combined_x, want_x, f"{who}: combined_x")
        same(got.combined_weights, want_weights, f"{who}: combined weights")


def verify_handle(
    case: InternodeCase, got: Received, want: reference.InternodeDispatched, who: str
) -> None:
    same, handle = payload.assert_same_bits, got.handle
    num = want.received.num_recv_tokens
    num_forward = want.send_nvl_head.shape[0]
    same(handle.is_token_in_rank, want.received.is_token_in_rank, f"{who}: is_token_in_rank")
    for name in HANDLE_FIELDS:
        same(getattr(handle, name), getattr(want, name), f"{who}: handle.{name}")
    same(handle.recv_src_idx, want.received.recv_src_idx, f"{who}: recv_src_idx")
    meta = handle.recv_src_meta[:num].view(torch.int32)
    same(meta, want.recv_src_meta, f"{who}: handle.recv_src_meta")
    same(handle.send_nvl_head[:num_forward], want.send_nvl_head, f"{who}: handle.send_nvl_head")
    assert (handle.send_nvl_head[num_forward:] == -1).all()
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
    want: reference.InternodeDispatched,
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
