"""The calls of vLLM's deepep_high_throughput, deepep_low_latency and deepep_v2 backends."""

from __future__ import annotations

import weakref
from typing import Any

import drop_in
import torch
from drop_in import HIDDEN, NUM_EXPERTS, NUM_TOPK

import deep_ep  # type: ignore[import-not-found]  # isort: skip

# The server's default is 1024 MiB; on the host as much as makes deep_comm keep a receive region.
BUFFER_BYTES = (1024 if torch.cuda.is_available() else 128) << 20
RDMA_BYTES = 0  # inside a node


class Manager:
    """One buffer per set of arguments, held weakly, as the server's all-to-all managers do."""

    def __init__(self) -> None:
        self.cache: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    def get(self, kind: type, group: Any, arguments: dict[str, Any]) -> Any:
        key = tuple(sorted(arguments.items()))
        buffer = self.cache.get(key)
        if buffer is None:
            buffer = kind(group=group, **arguments)
            self.cache[key] = buffer
        return buffer


def annotations() -> None:
    """Evaluated when the adapters are imported: they must be classes."""

    def prepare(
        config: deep_ep.Config | None,
        event: deep_ep.EventOverlap,
        buffer: deep_ep.Buffer | None,
        elastic: deep_ep.ElasticBuffer | None,
    ) -> None: ...

    assert len(prepare.__annotations__) >= 4
    assert hasattr(deep_ep, "ElasticBuffer")


def high_throughput(group: Any, routing: str, hidden: int, use_fp8: bool, is_dbo: bool) -> None:
    rank, num_ranks = group.rank(), group.size()
    manager = Manager()
    arguments = dict(
        num_nvl_bytes=BUFFER_BYTES, num_rdma_bytes=RDMA_BYTES, low_latency_mode=False,
        num_qps_per_rank=10 if RDMA_BYTES else 1, explicitly_destroy=True,
    )  # fmt: skip
    buffer = manager.get(deep_ep.Buffer, group, arguments)
    assert manager.get(deep_ep.Buffer, group, arguments) is buffer
    has_config = num_ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
    if is_dbo:
        deep_ep.Buffer.set_num_sms(min(20, 4))
    for step in range(2):
        num_tokens = drop_in.num_tokens_of(rank + step)
        x, topk_ids, weights = drop_in.routed(
            rank, num_tokens, hidden=hidden, routing=routing, seed=step
        )
        previous_event = buffer.capture() if is_dbo else None
        per_rank, per_rdma_rank, per_expert, mask, event = buffer.get_dispatch_layout(
            topk_idx=topk_ids, num_experts=NUM_EXPERTS, previous_event=previous_event,
            async_finish=False, allocate_on_comm_stream=False,
        )  # fmt: skip
        tokens: Any = x
        if use_fp8:
            tokens = (x.to(torch.float8_e4m3fn), torch.ones(num_tokens, 2, device=x.device))
        config = deep_ep.Buffer.get_dispatch_config(num_ranks) if has_config else None
        token_data, ids, recv_weights, counts, handle, event = buffer.dispatch(
            x=tokens, handle=None, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=mask,
            num_tokens_per_expert=per_expert, topk_idx=topk_ids, topk_weights=weights,
            expert_alignment=1, config=config, previous_event=previous_event,
            async_finish=not is_dbo, allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert is_dbo == (event.event is None)
        assert type(counts) is list and all(type(count) is int for count in counts)
        rows = token_data[0] if use_fp8 else token_data
        out = drop_in.local_experts(rows, ids, recv_weights, drop_in.first_of(rank, num_ranks))
        config = deep_ep.Buffer.get_combine_config(num_ranks) if has_config else None
        combined_x, _, event = buffer.combine(
            x=out, handle=handle, topk_weights=None, config=config, previous_event=None,
            async_finish=not is_dbo, allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert torch.equal(combined_x.float(), drop_in.dense(x, topk_ids, weights))
    deep_ep.Buffer.set_num_sms(20)
    buffer.destroy()
    del buffer
    assert len(manager.cache) == 0


def two_handles_in_flight(group: Any) -> None:
    """Dual-batch overlap: a handle per micro-batch, combined in the other order."""
    rank, num_ranks = group.rank(), group.size()
    buffer = deep_ep.Buffer(group=group, num_nvl_bytes=64 << 20)
    waiting = []
    for batch in range(2):
        x, ids, weights = drop_in.routed(rank, 5 + batch, seed=batch)
        layout = buffer.get_dispatch_layout(topk_idx=ids, num_experts=NUM_EXPERTS)
        result = buffer.dispatch(
            x=x, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2], is_token_in_rank=layout[3], topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip
        waiting.append((x, ids, weights, result))
    for x, ids, weights, (rows, local, recv_weights, _, handle, _) in reversed(waiting):
        first = drop_in.first_of(rank, num_ranks)
        out = drop_in.local_experts(rows, local, recv_weights, first)
        combined = buffer.combine(out, handle)[0]
        assert torch.equal(combined.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)
    buffer.destroy()


def low_latency_arguments(
    group: Any, hidden: int, max_tokens: int, enable_shrink: bool = False
) -> dict[str, Any]:
    """Of a Buffer to decode with."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=max_tokens, hidden=hidden, num_ranks=group.size(),
        num_experts=NUM_EXPERTS,
    )  # fmt: skip
    return dict(
        num_nvl_bytes=1 << 20, num_rdma_bytes=num_bytes, low_latency_mode=True,
        num_qps_per_rank=NUM_EXPERTS // group.size(), allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False, explicitly_destroy=True, enable_shrink=enable_shrink,
    )  # fmt: skip


def combined_into(
    output: torch.Tensor, buffer: Any, *given: Any, return_recv_hook: bool = True
) -> Any:
    """The hook. ``given``: rows of experts, choices, weights and the handle."""
    _, _, hook = buffer.low_latency_combine(
        *given, async_finish=False, zero_copy=False, return_recv_hook=return_recv_hook,
        out=output.fill_(float("nan")),
    )  # fmt: skip
    return hook


def zero_region(group: Any, buffer: Any) -> None:
    """The whole of it, between two steps, as fault tolerance does."""
    drop_in.finish(group)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    drop_in.finish(group)


def low_latency(group: Any, use_fp8: bool, return_recv_hook: bool, use_ue8m0: bool = False) -> None:
    """``use_ue8m0``: packed exponents, as the GEMMs of newer GPUs take them."""
    rank, num_ranks = group.rank(), group.size()
    hidden, max_tokens = 1024 if use_ue8m0 else 512, 16
    arguments = low_latency_arguments(group, hidden, max_tokens)
    buffer = Manager().get(deep_ep.Buffer, group, arguments)
    assert buffer.num_rdma_bytes == arguments["num_rdma_bytes"]
    for step in range(3):
        a1, topk_ids, weights = drop_in.routed(
            rank, min(max_tokens, drop_in.num_tokens_of(rank + step)), hidden=hidden,
            routing="holes", seed=step,
        )  # fmt: skip
        expert_x, count, handle, _, hook = buffer.low_latency_dispatch(
            a1, topk_ids, max_tokens, NUM_EXPERTS, use_fp8=use_fp8, round_scale=True,
            use_ue8m0=use_ue8m0, async_finish=False, return_recv_hook=True,
        )  # fmt: skip
        hook()
        if use_fp8:
            fp8, scales = expert_x
            num_local = NUM_EXPERTS // num_ranks
            packed = 4 if use_ue8m0 else 1
            assert scales.shape == (num_local, num_ranks * max_tokens, hidden // 128 // packed)
            assert scales.dtype == (torch.int32 if use_ue8m0 else torch.float32)
            # A transposed view: [L, H / 128 (/ 4), R * M] in memory.
            assert scales.stride() == (scales[0].numel(), 1, scales.shape[1])
            rows = drop_in.dequantised(fp8, scales)
        else:
            rows = expert_x
        out = drop_in.masked_experts(rows, count, drop_in.first_of(rank, num_ranks))
        output = torch.empty_like(a1)
        hook = combined_into(
            output, buffer, out, topk_ids, weights, handle, return_recv_hook=return_recv_hook
        )
        if return_recv_hook:
            hook()
        else:
            assert hook is None
        assert torch.equal(output.float(), drop_in.dense(a1, topk_ids, weights))
        drop_in.barrier(group)
        if step == 1:
            zero_region(group, buffer)
    buffer.destroy()


def low_latency_nvfp4(group: Any, use_fp8: bool) -> None:
    """4-bit rows for experts that take them: views of experts first, scales in tiles of 128 rows.

    ``use_fp8``: servers that pass it all the same.
    """
    rank, num_ranks = group.rank(), group.size()
    hidden, max_tokens = 512, 48
    arguments = low_latency_arguments(group, hidden, max_tokens)
    buffer = deep_ep.Buffer(group=group, **arguments)
    num_local, num_slots = NUM_EXPERTS // num_ranks, num_ranks * max_tokens
    first = drop_in.first_of(rank, num_ranks)
    for step in range(2):
        # Halves and whole numbers up to 3 in every block, 6 at its begin:
        # all of them exact in e2m1.
        x, ids, weights = drop_in.routed(
            rank, drop_in.num_tokens_of(rank + step), hidden=hidden, routing="holes", seed=step
        )
        x[:, ::16] = 6.0
        x_global_scale = torch.full((), 448.0, device=x.device)  # 448 * 6 / the largest magnitude
        expert_x, count, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, max_tokens, NUM_EXPERTS, use_fp8=use_fp8, round_scale=True, use_ue8m0=True,
            use_nvfp4=True, x_global_scale=x_global_scale, async_finish=False,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        assert isinstance(expert_x, tuple)
        rows, scales = expert_x[0].permute(2, 0, 1), expert_x[1]
        assert rows.shape == (num_local, num_slots, hidden // 2) and rows.dtype == torch.uint8
        assert rows.is_contiguous()
        num_tiles, num_words = -(-num_slots // 128), hidden // 64
        assert scales.shape == (32, 4, num_tiles, 4, num_words, num_local)
        assert scales.dtype == torch.float8_e4m3fn
        assert scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
        values = drop_in.dequantised_nvfp4(*expert_x, x_global_scale)
        out = drop_in.masked_experts(values, count, first)
        output = torch.empty_like(x)
        hook = combined_into(output, buffer, out, ids, weights, handle)
        hook()
        assert torch.equal(output.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)
    buffer.destroy()


def low_latency_micro_batches(group: Any) -> None:
    """Dual-batch overlap while decoding: both batches' calls are under way when a hook runs."""
    rank, num_ranks = group.rank(), group.size()
    hidden, max_tokens = 512, 16
    arguments = low_latency_arguments(group, hidden, max_tokens)
    buffer = deep_ep.Buffer(group=group, **arguments)
    first = drop_in.first_of(rank, num_ranks)
    for step in range(2):
        batches = [
            drop_in.routed(
                rank, drop_in.num_tokens_of(rank + step) % max_tokens, hidden=hidden,
                routing="holes", seed=2 * step + half,
            )
            for half in range(2)
        ]  # fmt: skip
        sent = [
            buffer.low_latency_dispatch(
                x, ids, max_tokens, NUM_EXPERTS, use_fp8=False, round_scale=True, use_ue8m0=False,
                async_finish=False, return_recv_hook=True,
            )
            for x, ids, _ in batches
        ]  # fmt: skip
        pending = []
        for (x, ids, weights), (rows, count, handle, _, hook) in zip(batches, sent, strict=True):
            hook()
            output = torch.empty_like(x)
            hook = combined_into(
                output, buffer, drop_in.masked_experts(rows, count, first), ids, weights, handle
            )
            pending.append((hook, output))
        for (x, ids, weights), (hook, output) in zip(batches, pending, strict=True):
            hook()
            assert torch.equal(output.float(), drop_in.dense(x, ids, weights))
    drop_in.barrier(group)
    buffer.destroy()


def elastic(
    group: Any, is_captured: bool, use_fp8: bool, cap: int | None, is_mx: bool = False
) -> None:
    """deepep_v2: expand and sync when eager; compact without sync where graphs are captured.

    ``is_mx``: FP8 with a UE8M0 scale for 32 columns, four in an int32.
    """
    rank, num_ranks = group.rank(), group.size()
    buffer = deep_ep.ElasticBuffer(
        group=group, num_max_tokens_per_rank=32, hidden=HIDDEN, num_topk=NUM_TOPK,
        use_fp8_dispatch=use_fp8, allow_hybrid_mode=True, prefer_overlap_with_compute=True,
        allow_multiple_reduction=True, explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.get_theoretical_num_sms(num_experts=NUM_EXPERTS, num_topk=NUM_TOPK) > 0
    first = drop_in.first_of(rank, num_ranks)
    for step in range(2):
        num_tokens = drop_in.num_tokens_of(rank + step)
        x, ids, weights = drop_in.routed(rank, num_tokens, routing="holes", seed=step)
        tokens: Any = x
        if use_fp8:
            scales = torch.ones(num_tokens, 2, device=x.device)
            if is_mx:
                scales = torch.arange(2 * num_tokens, dtype=torch.int32, device=x.device)
                scales = scales.view(num_tokens, 2) + (rank << 16)
            tokens = (x.to(torch.float8_e4m3fn), scales)
        recv, recv_ids, recv_weights, handle, event = buffer.dispatch(
            x=tokens, topk_idx=ids, topk_weights=weights, num_experts=NUM_EXPERTS,
            num_max_tokens_per_rank=cap, do_expand=not is_captured, do_cpu_sync=not is_captured,
            async_with_compute_stream=False,
        )  # fmt: skip
        assert event.event is None
        rows = recv[0] if use_fp8 else recv
        num_recv = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        if is_mx:
            # Opaque: each is that of the row beside it.
            assert recv[1].dtype == torch.int32 and recv[1].shape == (rows.shape[0], 2)
            owners = recv[1][: num_recv if is_captured else None, 0] >> 16
            assert bool(((owners >= 0) & (owners < num_ranks)).all())
            assert bool((recv[1][: len(owners), 1] == recv[1][: len(owners), 0] + 1).all())
        if is_captured:
            assert handle.num_recv_tokens_per_expert_list == []
            assert rows.shape[0] == num_ranks * (cap or 32)
            is_real = (torch.arange(rows.shape[0], device=x.device) < num_recv).unsqueeze(1)
            assert not bool((recv_ids >= 0).logical_and(~is_real).any())
            rows = torch.where(is_real, rows.float(), 0.0)
            out = drop_in.local_experts(rows, recv_ids, recv_weights, first)
        else:
            assert recv_ids is None and recv_weights.shape == (rows.shape[0],)
            out = torch.zeros(rows.shape, dtype=torch.bfloat16, device=x.device)
            begin = 0
            for expert, count in enumerate(handle.num_recv_tokens_per_expert_list):
                part = slice(begin, begin + count)
                scale = recv_weights[part].unsqueeze(1) * (first + expert + 1)
                out[part] = (rows[part].float() * scale).to(torch.bfloat16)
                begin += count
        combined_x, _, event = buffer.combine(
            x=out, handle=handle, topk_weights=None, async_with_compute_stream=step == 1,
            allocate_on_comm_stream=step == 1,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert torch.equal(combined_x.float(), drop_in.dense(x, ids, weights))
    buffer.destroy()


def fault_tolerance(group: Any) -> None:
    """A rank is masked out; the others go on without its tokens and
    experts; later it comes back.
    """
    rank, num_ranks = group.rank(), group.size()
    gone, hidden, max_tokens = 1, 512, 16
    arguments = low_latency_arguments(group, hidden, max_tokens, enable_shrink=True)
    buffer = deep_ep.Buffer(group=group, **arguments)
    assert buffer.enable_shrink
    mask = torch.full((num_ranks,), 7, dtype=torch.int32, device=buffer.device)
    first, num_local = drop_in.first_of(gone, num_ranks), drop_in.num_local_of(gone, num_ranks)
    for step in range(6):
        is_masked = step in (2, 3)
        if step == 2 and rank != gone:
            buffer.low_latency_update_mask_buffer(gone, True)
        if step == 4:  # everybody meets again
            drop_in.barrier(group)
            buffer.low_latency_clean_mask_buffer()
            zero_region(group, buffer)
        if is_masked and rank == gone:
            continue
        x, ids, weights = drop_in.routed(rank, 6 + rank, hidden=hidden, seed=step)
        expert_x, count, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, max_tokens, NUM_EXPERTS, use_fp8=False, async_finish=False,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        out = drop_in.masked_experts(expert_x, count, drop_in.first_of(rank, num_ranks))
        output = torch.empty_like(x)
        hook = combined_into(output, buffer, out, ids, weights, handle)
        hook()
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [int(is_masked and peer == gone) for peer in range(num_ranks)]
        if is_masked:
            is_lost = (ids >= first) & (ids < first + num_local)
            ids = torch.where(is_lost, -1, ids)
        assert torch.equal(output.float(), drop_in.dense(x, ids, weights)), step
    drop_in.barrier(group)
    buffer.destroy()
