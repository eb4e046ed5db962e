"""The calls of SGLang's deepep (normal, low latency, auto) and deepep_v2 backends."""

from __future__ import annotations

from typing import Any

import drop_in
import torch
from drop_in import HIDDEN, NUM_EXPERTS, NUM_TOPK

from deep_ep import Buffer, Config, ElasticBuffer  # type: ignore[import-not-found]  # isort: skip

MAX_TOKENS = 16
JSON_CONFIG = {
    "num_sms": 4, "num_max_nvl_chunked_send_tokens": 4, "num_max_nvl_chunked_recv_tokens": 64,
    "num_max_rdma_chunked_send_tokens": 4, "num_max_rdma_chunked_recv_tokens": 64,
}  # fmt: skip


def make_buffer(group: Any, hidden: int) -> Any:
    size = group.size()
    num_nvl_bytes = num_rdma_bytes = 0
    hidden_bytes = hidden * 2
    for config in (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)):
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, size), num_nvl_bytes)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, size), num_rdma_bytes)
    hint = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, hidden, size, NUM_EXPERTS)
    num_rdma_bytes = max(hint, num_rdma_bytes)
    return Buffer(
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode=True,
        num_qps_per_rank=max(Buffer.num_sms, NUM_EXPERTS // size), allow_mnnvl=True,
        use_fabric=True,
    )  # fmt: skip


def normal(group: Any, buffer: Any, seed: int, alignment: int, is_async: bool) -> None:
    rank, num_ranks = group.rank(), group.size()
    hidden = 512
    x, topk_ids, weights = drop_in.routed(rank, 11 + rank, hidden=hidden, seed=seed)
    previous_event = Buffer.capture() if is_async else None
    layout = buffer.get_dispatch_layout(
        topk_ids, NUM_EXPERTS, previous_event=previous_event, async_finish=is_async,
        allocate_on_comm_stream=previous_event is not None,
    )  # fmt: skip
    per_rank, per_rdma_rank, per_expert, mask, previous_event = layout
    # Packed UE8M0, four columns of 128 in an int32, column-major with rows padded to 4.
    num_tokens = x.shape[0]
    packed = torch.full((1, -(-num_tokens // 4) * 4), 0x7F7F7F7F, dtype=torch.int32)
    scales = packed.to(x.device).t()[:num_tokens]
    (recv_x, recv_scales), ids, recv_weights, counts, handle, event = buffer.dispatch(
        (x.to(torch.float8_e4m3fn), scales), topk_idx=topk_ids, topk_weights=weights,
        num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=mask, num_tokens_per_expert=per_expert, previous_event=previous_event,
        async_finish=is_async, allocate_on_comm_stream=is_async, expert_alignment=alignment,
        config=Config(**JSON_CONFIG) if seed % 2 else None,
    )  # fmt: skip
    if is_async:
        event.current_stream_wait()
    assert sum(counts) % alignment == 0 and all(count % alignment == 0 for count in counts)
    assert bool((recv_scales == 0x7F7F7F7F).all())
    first = drop_in.first_of(rank, num_ranks)
    out = drop_in.local_experts(recv_x, ids, recv_weights, first)
    previous_event = Buffer.capture() if is_async else None
    combined_x, _, event = buffer.combine(
        out, handle, async_finish=is_async, previous_event=previous_event,
        allocate_on_comm_stream=previous_event is not None,
        config=Config(**JSON_CONFIG) if seed % 2 else None,
    )  # fmt: skip
    if is_async:
        event.current_stream_wait()
    assert torch.equal(combined_x.float(), drop_in.dense(x, topk_ids, weights))


def low_latency(
    group: Any, buffer: Any, seed: int, use_hook: bool, use_fp8: bool, extra: dict[str, Any]
) -> None:
    rank, num_ranks = group.rank(), group.size()
    x, topk_ids, weights = drop_in.routed(rank, 7, hidden=512, seed=seed)
    global_scale = None
    if "use_nvfp4" in extra:
        x[:, ::16] = 6.0  # so that e2m1 holds every element
        global_scale = torch.full((), 448.0, device=x.device)
        extra = dict(extra, x_global_scale=global_scale)
    packed, masked_m, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=use_fp8, async_finish=not use_hook,
        return_recv_hook=use_hook, **extra,
    )  # fmt: skip
    hook() if use_hook else event.current_stream_wait()
    if global_scale is not None:
        rows = drop_in.dequantised_nvfp4(*packed, global_scale)
    else:
        rows = drop_in.dequantised(*packed) if use_fp8 else packed
    out = drop_in.masked_experts(rows, masked_m, drop_in.first_of(rank, num_ranks))
    combined, event, hook = buffer.low_latency_combine(
        x=out, topk_idx=topk_ids, topk_weights=weights, handle=handle, async_finish=not use_hook,
        return_recv_hook=use_hook,
    )  # fmt: skip
    hook() if use_hook else event.current_stream_wait()
    assert torch.equal(combined.float(), drop_in.dense(x, topk_ids, weights))


def auto(group: Any) -> None:
    """One Buffer for both modes, cleaned on each switch to decoding."""
    buffer = make_buffer(group, 512)
    assert buffer.low_latency_mode and buffer.group_size == group.size()
    seed = 0
    for _ in range(2):
        for alignment, is_async in ((128, True), (1, False)):
            normal(group, buffer, seed, alignment, is_async)
            seed += 1
        buffer.clean_low_latency_buffer(MAX_TOKENS, 512, NUM_EXPERTS)
        hopper = dict(round_scale=True, use_ue8m0=False)
        blackwell = dict(round_scale=True, use_ue8m0=True)
        for use_hook, use_fp8, extra in (
            (True, True, hopper),
            (False, True, blackwell),
            (True, False, {}),
            (True, False, dict(use_nvfp4=True)),
        ):
            low_latency(group, buffer, seed, use_hook, use_fp8, extra)
            seed += 1
    drop_in.barrier(group)


def elastic(group: Any, is_prefill: bool) -> None:
    rank, num_ranks = group.rank(), group.size()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=64, hidden=HIDDEN, num_topk=NUM_TOPK,
        use_fp8_dispatch=True, allow_hybrid_mode=False, sl_idx=0,
        prefer_overlap_with_compute=False,
    )  # fmt: skip
    assert buffer.num_bytes > 0
    num_tokens = max(1, drop_in.num_tokens_of(rank))
    x, ids, weights = drop_in.routed(rank, num_tokens)
    if drop_in.num_tokens_of(rank) == 0:
        weights.zero_()  # an idle rank sends one token that counts for nothing
    scales = torch.ones(num_tokens, HIDDEN // 128, device=x.device)
    (recv_x, recv_sf), recv_ids, recv_weights, handle, _ = buffer.dispatch(
        (x.to(torch.float8_e4m3fn), scales), topk_idx=ids, topk_weights=weights,
        num_experts=NUM_EXPERTS, num_max_tokens_per_rank=64, expert_alignment=128, num_sms=0,
        use_tma_aligned_col_major_sf=True, do_cpu_sync=is_prefill, do_expand=True,
    )  # fmt: skip
    assert recv_ids is None and recv_weights.shape == (recv_x.shape[0],)
    assert recv_sf.stride() == (1, -(-recv_x.shape[0] // 4) * 4)
    assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) <= num_ranks * 64
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    first = drop_in.first_of(rank, num_ranks)
    out = torch.full(recv_x.shape, float("nan"), dtype=torch.bfloat16, device=x.device)
    for expert, (end, count) in enumerate(zip(ends, counts, strict=True)):
        assert (end - count) % 128 == 0
        part = slice(end - count, end)
        assert bool((recv_sf[part] == 1).all())
        scale = recv_weights[part].unsqueeze(1) * (first + expert + 1)
        out[part] = (recv_x[part].float() * scale).to(torch.bfloat16)
    combined, combined_weights, _ = buffer.combine(x=out, handle=handle, topk_weights=recv_weights)
    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    assert torch.equal(combined_weights, weights)
    combined, combined_weights, _ = buffer.combine(x=out, handle=handle, topk_weights=None)
    assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    assert combined_weights is None
    drop_in.barrier(group)
