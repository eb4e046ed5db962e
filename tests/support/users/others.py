"""The calls of torchtitan, LightLLM, lmdeploy, TensorRT-LLM and slime."""

from __future__ import annotations

from typing import Any

import drop_in
import torch
from drop_in import HIDDEN, NUM_EXPERTS, NUM_TOPK

from deep_comm.ranks.rendezvous import Rendezvous

import deep_ep  # type: ignore[import-not-found]  # isort: skip


# ---- torchtitan: ElasticBuffer, training compact with sync, inference expanded without -----------


class TitanDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, scores, buffer, num_sms):
        recv_x, recv_ids, recv_scores, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=scores, num_experts=NUM_EXPERTS,
            num_max_tokens_per_rank=buffer.num_max_tokens_per_rank, num_sms=num_sms,
            do_expand=False, do_cpu_sync=True,
        )  # fmt: skip
        ctx.buffer, ctx.handle = buffer, handle
        return recv_x, recv_ids, recv_scores, handle

    @staticmethod
    def backward(ctx, grad_x, grad_ids, grad_scores, grad_handle):
        grad_x, grad_scores, _ = ctx.buffer.combine(
            grad_x, handle=ctx.handle, topk_weights=grad_scores.float()
        )
        return grad_x, None, grad_scores, None, None


class TitanCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, handle, buffer):
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, event = buffer.combine(x, handle=handle, async_with_compute_stream=True)
        if event.event is not None:
            event.current_stream_wait()
        return combined

    @staticmethod
    def backward(ctx, grad):
        grad_x, *_ = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, num_sms=ctx.handle.num_sms, do_cpu_sync=False
        )
        return grad_x, None, None


def torchtitan(group: Any) -> None:
    rank, num_ranks = group.rank(), group.size()
    num_bytes = deep_ep.ElasticBuffer.get_buffer_size_hint(
        group, 32, HIDDEN, num_topk=NUM_TOPK, use_fp8_dispatch=False
    )
    buffer = deep_ep.ElasticBuffer(
        group, num_bytes=num_bytes, num_max_tokens_per_rank=32, hidden=HIDDEN, num_topk=NUM_TOPK,
        use_fp8_dispatch=False, deterministic=True, explicitly_destroy=True,
    )  # fmt: skip
    assert (buffer.group, buffer.num_bytes, buffer.num_max_tokens_per_rank) == (
        group, num_bytes, 32
    )  # fmt: skip
    num_sms = buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK)
    x, ids, scores = drop_in.routed(rank, drop_in.num_tokens_of(rank), routing="holes")
    x.requires_grad_()
    scores.requires_grad_()
    recv_x, recv_ids, recv_scores, handle = TitanDispatch.apply(x, ids, scores, buffer, num_sms)
    per_expert = torch.diff(
        handle.psum_num_recv_tokens_per_expert, prepend=torch.zeros(1, device=x.device)
    )
    assert per_expert.tolist() == handle.num_recv_tokens_per_expert_list
    first = drop_in.first_of(rank, num_ranks)
    scale = torch.where(recv_ids >= 0, (recv_ids + first + 1) * recv_scores, 0.0)
    rows = (recv_x.float() * scale.sum(dim=1, keepdim=True)).to(torch.bfloat16)
    TitanCombine.apply(rows, handle, buffer).sum().backward()
    dense_x = x.detach().clone().requires_grad_()
    dense_scores = scores.detach().clone().requires_grad_()
    drop_in.dense(dense_x, ids, dense_scores).sum().backward()
    assert torch.equal(x.grad, dense_x.grad)
    assert torch.equal(scores.grad, dense_scores.grad)
    with torch.no_grad():
        torchtitan_inference(group, buffer, num_sms, x.detach(), ids, scores.detach())
    drop_in.barrier(group)


def torchtitan_inference(group: Any, buffer: Any, num_sms: int, x, ids, scores) -> None:
    """Expanded, without the host: counts are differences of the prefix sums on the device."""
    rank, num_ranks = group.rank(), group.size()
    recv_x, recv_ids, recv_scores, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=scores, num_experts=NUM_EXPERTS,
        num_max_tokens_per_rank=buffer.num_max_tokens_per_rank, num_sms=num_sms, do_expand=True,
        do_cpu_sync=False,
    )  # fmt: skip
    assert recv_ids is None and event.event is None
    assert handle.num_recv_tokens_per_expert_list == []
    ends = handle.psum_num_recv_tokens_per_expert
    per_expert = torch.diff(ends, prepend=ends.new_zeros(1))
    assert torch.equal(per_expert, handle.num_unaligned_recv_tokens_per_expert)
    row = torch.arange(recv_x.shape[0], dtype=torch.int32, device=x.device)
    expert = drop_in.first_of(rank, num_ranks) + torch.searchsorted(ends, row, right=True)
    is_real = row < ends[-1]
    scale = torch.where(is_real, recv_scores * (expert + 1), 0.0).unsqueeze(1)
    out = torch.where(is_real.unsqueeze(1), recv_x.float() * scale, 0.0).to(torch.bfloat16)
    combined, _, event = buffer.combine(out, handle=handle, async_with_compute_stream=True)
    if event.event is not None:
        event.current_stream_wait()
    assert torch.equal(combined.float(), drop_in.dense(x, ids, scores))


# ---- LightLLM: expanded prefill whose combine metadata is rewritten; legacy decode beside it -----


def lightllm_prefill(group: Any, is_rewritten: bool) -> None:
    rank, num_ranks = group.rank(), group.size()
    buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=32, hidden=HIDDEN, num_topk=NUM_TOPK,
        use_fp8_dispatch=True, allow_multiple_reduction=True,
    )  # fmt: skip
    num_sms = buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK)
    num_tokens = drop_in.num_tokens_of(rank)
    x, ids, weights = drop_in.routed(rank, num_tokens)
    scales = torch.ones(num_tokens, HIDDEN // 128, device=x.device)
    previous_event = deep_ep.ElasticBuffer.capture()
    assert type(previous_event) is deep_ep.EventHandle
    (recv_x, recv_sf), recv_ids, recv_weights, handle, event = buffer.dispatch(
        (x.to(torch.float8_e4m3fn), scales), topk_idx=ids, topk_weights=weights,
        num_experts=NUM_EXPERTS, num_max_tokens_per_rank=32, expert_alignment=128,
        num_sms=num_sms, previous_event=previous_event, async_with_compute_stream=True,
        allocate_on_comm_stream=True, do_cpu_sync=True, do_handle_copy=False, do_expand=True,
        use_tma_aligned_col_major_sf=True,
    )  # fmt: skip
    if event.event is not None:
        event.current_stream_wait()
    assert handle.topk_idx is ids
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    padded = handle.num_recv_tokens_per_expert_list
    assert [-(-count // 128) * 128 for count in counts] == padded
    first = drop_in.first_of(rank, num_ranks)
    out = torch.full(recv_x.shape, float("nan"), dtype=torch.bfloat16, device=x.device)
    begin = 0
    for expert, (count, room) in enumerate(zip(counts, padded, strict=True)):
        part = slice(begin, begin + count)
        scale = recv_weights[part].unsqueeze(1) * (first + expert + 1)
        out[part] = (recv_x[part].float() * scale).to(torch.bfloat16)
        begin += room
    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32 and metadata.is_contiguous()
    assert metadata.shape == (handle.num_recv_tokens, NUM_TOPK + 2)
    if is_rewritten:
        # Rows of one token are summed here, and the columns say so: row n alone stands for token n.
        merged = torch.zeros(handle.num_recv_tokens, HIDDEN, device=x.device)
        for n, row in enumerate(metadata[:, 2:].tolist()):
            for slot in row:
                if slot >= 0:
                    merged[n] += out[slot].float()
        metadata[:, 2:] = -1
        rows = torch.arange(metadata.shape[0], dtype=torch.int32, device=x.device)
        metadata[:, 2] = rows
        out = merged.to(torch.bfloat16)
    previous_event = deep_ep.ElasticBuffer.capture()
    combined, _, event = buffer.combine(
        out, handle, num_sms=num_sms, previous_event=previous_event,
        async_with_compute_stream=True, allocate_on_comm_stream=True,
    )  # fmt: skip
    if event.event is not None:
        event.current_stream_wait()
    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)


def lightllm_decode_buffer(group: Any) -> Any:
    num_ranks = group.size()
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, HIDDEN * 2, num_ranks, NUM_EXPERTS)
    return deep_ep.Buffer(
        group, num_rdma_bytes=hint, low_latency_mode=True,
        num_qps_per_rank=NUM_EXPERTS // num_ranks,
    )  # fmt: skip


def lightllm_decode(group: Any) -> None:
    """Needs DEEP_COMM_DEEP_EP_FULL_RDMA=1: the region serves as workspace between decodes."""
    rank, num_ranks = group.rank(), group.size()
    buffer = lightllm_decode_buffer(group)
    x, ids, weights = drop_in.routed(rank, 8, hidden=HIDDEN * 2)
    for _ in range(2):
        packed, masked_m, handle, _, hook = buffer.low_latency_dispatch(
            topk_idx=ids, x=x, num_max_dispatch_tokens_per_rank=16, num_experts=NUM_EXPERTS,
            use_fp8=True, return_recv_hook=False,
        )  # fmt: skip
        assert hook is None
        out = drop_in.masked_experts(
            drop_in.dequantised(*packed), masked_m, drop_in.first_of(rank, num_ranks)
        )
        combined, _, _ = buffer.low_latency_combine(out, ids, weights, handle)
        expected = drop_in.dense(x, ids, weights)
        error = (combined.float() - expected).abs().max() if len(x) else 0.0
        # The largest magnitude of a block is 3: its e4m3 steps are exact after scaling only nearly.
        assert float(error) <= 0.08 * float(expected.abs().max())
        drop_in.finish(group)
        workspace = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
        assert workspace.numel() >= buffer.num_rdma_bytes
        workspace.fill_(255)
        drop_in.finish(group)
        buffer.clean_low_latency_buffer(16, HIDDEN * 2, NUM_EXPERTS)
        drop_in.barrier(group)


def lightllm_both(group: Any) -> None:
    """The two buffers of one server: a prefill while a decode waits for its hook."""
    rank, num_ranks = group.rank(), group.size()
    buffer = lightllm_decode_buffer(group)
    x, ids, weights = drop_in.routed(rank, 8, hidden=HIDDEN * 2)
    rows, masked_m, handle, _, hook = buffer.low_latency_dispatch(
        topk_idx=ids, x=x, num_max_dispatch_tokens_per_rank=16, num_experts=NUM_EXPERTS,
        use_fp8=False, return_recv_hook=True,
    )  # fmt: skip
    lightllm_prefill(group, False)
    hook()
    out = drop_in.masked_experts(rows, masked_m, drop_in.first_of(rank, num_ranks))
    combined, _, hook = buffer.low_latency_combine(out, ids, weights, handle, return_recv_hook=True)
    lightllm_prefill(group, True)
    hook()
    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)


# ---- lmdeploy ------------------------------------------------------------------------------------


def lmdeploy(group: Any) -> None:
    rank, num_ranks = group.rank(), group.size()
    deep_ep.Buffer.set_num_sms(20)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, HIDDEN * 2, num_ranks, NUM_EXPERTS)
    buffer = deep_ep.Buffer(
        *(group,), num_nvl_bytes=16 << 20, num_rdma_bytes=hint, low_latency_mode=True,
        num_qps_per_rank=max(20, NUM_EXPERTS // num_ranks), allow_mnnvl=False,
        explicitly_destroy=True,
    )  # fmt: skip
    buffer.set_num_sms(20)
    assert isinstance(buffer, deep_ep.Buffer)
    assert (buffer.group, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (group, 16 << 20, hint)
    assert buffer.low_latency_mode and buffer.group_size == num_ranks
    x, ids, weights = drop_in.routed(rank, 8, hidden=HIDDEN * 2)
    buffer.clean_low_latency_buffer(16, HIDDEN * 2, NUM_EXPERTS)
    (fp8, scales), masked_m, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, 16, NUM_EXPERTS, use_fp8=True, async_finish=True, return_recv_hook=False
    )
    if event.event is not None:
        event.current_stream_wait()
    rows = drop_in.dequantised(fp8, scales).to(torch.bfloat16).float()
    out = drop_in.masked_experts(rows, masked_m, drop_in.first_of(rank, num_ranks))
    combined, event, hook = buffer.low_latency_combine(
        out, ids, weights, handle, async_finish=True, return_recv_hook=False
    )
    if event.event is not None:
        event.current_stream_wait()
    expected = drop_in.dense(x, ids, weights)
    assert float((combined.float() - expected).abs().max()) <= 0.08 * float(expected.abs().max())
    drop_in.barrier(group)
    buffer.destroy()


# ---- TensorRT-LLM: an MPI communicator, worst-case dispatch --------------------------------------


class MpiCommunicator:
    """The part of mpi4py's interface that a Buffer asks for, over any group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return int(self._group.rank())

    def Get_size(self) -> int:
        return int(self._group.size())

    def allgather(self, payload: Any) -> list[Any]:
        return Rendezvous(self._group).all_gather_object(payload)


def tensorrt_llm(group: Any) -> None:
    comm = MpiCommunicator(group)
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    max_tokens = 24
    buffer = deep_ep.Buffer(None, 64 << 20, 0, comm=comm)
    assert buffer.group is comm and buffer.rank == rank
    x, ids, weights = drop_in.routed(rank, drop_in.num_tokens_of(rank))
    per_rank, per_rdma_rank, per_expert, mask, event = buffer.get_dispatch_layout(ids, NUM_EXPERTS)
    assert event.event is None
    recv_x, recv_ids, recv_weights, counts, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=mask,
        num_tokens_per_expert=per_expert, num_worst_tokens=max_tokens * num_ranks,
        global_expert_id_offset=0,
    )  # fmt: skip
    assert event.event is None and counts == []
    assert recv_x.shape[0] == max_tokens * num_ranks
    num_recv = int(handle[0][num_ranks - 1][rank])
    assert bool((recv_ids[num_recv:] == -1).all())
    recv_x[num_recv:] = 0
    first = drop_in.first_of(rank, num_ranks)
    out = drop_in.local_experts(recv_x, recv_ids, recv_weights, first)
    combined, _, event = buffer.combine(out, handle)
    assert event.event is None
    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)
    del buffer
    tensorrt_llm_decode(group, comm)


def tensorrt_llm_decode(group: Any, comm: MpiCommunicator) -> None:
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, HIDDEN, num_ranks, NUM_EXPERTS)
    buffer = deep_ep.Buffer(
        None, 0, hint, low_latency_mode=True, num_qps_per_rank=NUM_EXPERTS // num_ranks,
        allow_nvlink_for_low_latency_mode=True, comm=comm,
    )  # fmt: skip
    x, ids, weights = drop_in.routed(rank, drop_in.num_tokens_of(rank) % 16, routing="holes")
    rows, count, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, 16, NUM_EXPERTS, use_fp8=False
    )
    assert event.event is None and hook is None
    out = drop_in.masked_experts(rows, count, drop_in.first_of(rank, num_ranks))
    combined, event, hook = buffer.low_latency_combine(out, ids, weights, handle)
    assert event.event is None and hook is None
    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)


# ---- slime: replaces Buffer.__init__ -------------------------------------------------------------


def slime(group: Any) -> None:
    original = deep_ep.Buffer.__init__
    seen: list[int] = []

    def outside_of_the_tracked_region(self: Any, *args: Any, **options: Any) -> None:
        seen.append(1)
        original(self, *args, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    drop_in.barrier(group)
    deep_ep.Buffer.__init__ = outside_of_the_tracked_region
    try:
        buffer = deep_ep.Buffer(group, 1 << 20)
        drop_in.barrier(group)
    finally:
        deep_ep.Buffer.__init__ = original
    assert seen
    x, ids, weights = drop_in.routed(group.rank(), 3)
    layout = buffer.get_dispatch_layout(ids, NUM_EXPERTS)
    assert int(layout[0].sum()) == int(layout[3].sum())
    drop_in.barrier(group)


# ---- two tiers: the ten-item handle --------------------------------------------------------------


def two_nodes(group: Any) -> None:
    """DeepEP's own test of several nodes: with DEEP_COMM_RANKS_PER_NODE half of the group."""
    rank, num_ranks = group.rank(), group.size()
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (deep_ep.Config(4, 4, 32, 4, 16), deep_ep.Config(4, 2, 16, 2, 8)):
        num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(2 * HIDDEN, 16))
        num_rdma_bytes = max(num_rdma_bytes, config.get_rdma_buffer_size_hint(2 * HIDDEN, 16))
    buffer = deep_ep.Buffer(
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode=False, num_qps_per_rank=4,
        explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.runtime.get_num_rdma_ranks() == 2
    assert buffer.runtime.get_rdma_rank() == rank // (num_ranks // 2)
    x, ids, weights = drop_in.routed(rank, drop_in.num_tokens_of(rank), routing="holes")
    per_rank, per_rdma_rank, per_expert, mask, _ = buffer.get_dispatch_layout(ids, NUM_EXPERTS)
    assert per_rdma_rank.shape == (2,) and per_rdma_rank.dtype == torch.int32
    config = deep_ep.Config(4, 4, 32, 4, 16)
    recv_x, recv_ids, recv_weights, counts, handle, _ = buffer.dispatch(
        x, None, per_rank, per_rdma_rank, mask, per_expert, ids, weights, config=config
    )
    assert isinstance(handle, tuple) and len(handle) == 10
    assert int(handle[-4][-1]) == recv_x.shape[0]  # rows of all sources
    assert handle[7].dtype == torch.uint8 and handle[7].shape == (recv_x.shape[0], 8)
    assert sum(counts) == int((recv_ids >= 0).sum())
    first = drop_in.first_of(rank, num_ranks)
    out = drop_in.local_experts(recv_x, recv_ids, recv_weights, first)
    for some in (handle, tuple(handle)):
        combined, combined_weights, _ = buffer.combine(
            out, some, topk_weights=recv_weights, config=deep_ep.Config(4, 2, 16, 2, 8)
        )
        assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
        assert torch.equal(combined_weights, torch.where(ids >= 0, weights, 0.0))
        again = buffer.dispatch(x, handle=some, config=config)
        assert torch.equal(again[0], recv_x) and again[1:5] == (None,) * 4
    drop_in.barrier(group)
    buffer.destroy()
