"""The calls that programs written for DeepEP's Buffer make: their order, their arguments."""

import weakref

import pytest
import torch

import deep_comm
from deep_comm import local
from deep_comm.ranks.topology import first_expert, num_local_experts

NUM_EXPERTS, NUM_TOPK, HIDDEN = 8, 2, 256


def expert(expert_idx: int, rows: torch.Tensor) -> torch.Tensor:
    return rows * (expert_idx + 1)


def routed(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    # Small integers, so that every order of summation gives the same bfloat16.
    x = torch.randint(-3, 4, (num_tokens, HIDDEN), generator=generator).to(torch.bfloat16)
    topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    weights = torch.full((num_tokens, NUM_TOPK), 0.5)
    return x, topk_idx, weights


def dense_layer(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    scale = ((topk_idx + 1) * weights).sum(dim=1, keepdim=True)
    return x.float() * scale


class HighThroughputManager:
    """An inference server's all-to-all manager: one Buffer per set of arguments, held weakly."""

    def __init__(self, group) -> None:
        self.group = group
        self.cache: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

    def get_handle(self) -> deep_comm.Buffer:
        arguments = dict(
            num_nvl_bytes=8 << 20, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
            explicitly_destroy=True,
        )  # fmt: skip
        key = tuple(sorted(arguments.items()))
        buffer = self.cache.get(key)
        if buffer is None:
            buffer = deep_comm.Buffer(group=self.group, device="cpu", **arguments)
            self.cache[key] = buffer
        return buffer


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("async_finish", [False, True])
def test_inference_server_prepare_and_finalize(num_ranks: int, async_finish: bool) -> None:
    def fn(group):
        manager = HighThroughputManager(group)
        buffer = manager.get_handle()
        assert manager.get_handle() is buffer
        rank = group.rank()
        x, topk_idx, weights = routed(rank, 10 + rank)
        config = deep_comm.Buffer.get_dispatch_config(num_ranks)
        previous_event = deep_comm.Buffer.capture()
        per_rank, per_rdma_rank, per_expert, mask, event = buffer.get_dispatch_layout(
            topk_idx=topk_idx, num_experts=NUM_EXPERTS, previous_event=previous_event,
            async_finish=False, allocate_on_comm_stream=False,
        )  # fmt: skip
        assert per_rdma_rank is None
        token_data, ids, recv_weights, counts, handle, event = buffer.dispatch(
            x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=mask, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
            topk_weights=weights, expert_alignment=1, config=config, previous_event=event,
            async_finish=async_finish, allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert isinstance(counts, list) and sum(counts) == int((ids >= 0).sum())
        # Local indices to global ones; -1 to an index that no expert of this rank has.
        first = first_expert(rank, NUM_EXPERTS, num_ranks)
        elsewhere = 0 if first > 0 else NUM_EXPERTS - 1
        global_ids = torch.where(ids == -1, elsewhere, ids + first)
        out = torch.zeros(token_data.shape, dtype=torch.float32)
        for local_idx in range(num_local_experts(rank, NUM_EXPERTS, num_ranks)):
            weight = (recv_weights * (global_ids == first + local_idx)).sum(dim=1, keepdim=True)
            out += weight * expert(first + local_idx, token_data.float())
        config = deep_comm.Buffer.get_combine_config(num_ranks)
        combined_x, _, event = buffer.combine(
            x=out.to(torch.bfloat16), handle=handle, topk_weights=None, config=config,
            previous_event=deep_comm.EventOverlap(None), async_finish=async_finish,
            allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert torch.equal(combined_x.float(), dense_layer(x, topk_idx, weights))
        group.barrier()
        buffer.destroy()

    local.run(fn, num_ranks, timeout_s=120)


class FusedDispatch(torch.autograd.Function):
    """A trainer's dispatch: its backward is a combine with the same handle."""

    @staticmethod
    def forward(ctx, x, topk_idx, probs, buffer, async_finish):
        previous_event = deep_comm.EventOverlap(deep_comm.EventHandle()) if async_finish else None
        per_rank, per_rdma_rank, per_expert, mask, event = buffer.get_dispatch_layout(
            topk_idx, NUM_EXPERTS, previous_event=previous_event, async_finish=async_finish,
            allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        recv_x, recv_idx, recv_probs, counts, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=probs, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=mask,
            num_tokens_per_expert=per_expert, previous_event=event, async_finish=async_finish,
            allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        if async_finish:
            event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.async_finish = buffer, handle, async_finish
        return recv_x, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_x, grad_idx, grad_probs, grad_counts, grad_handle):
        event = deep_comm.EventOverlap(deep_comm.EventHandle()) if ctx.async_finish else None
        grad_x, grad_probs, event = ctx.buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=grad_probs.float(), previous_event=event,
            async_finish=ctx.async_finish, allocate_on_comm_stream=ctx.async_finish,
        )  # fmt: skip
        if ctx.async_finish:
            event.current_stream_wait()
        return grad_x, None, grad_probs, None, None


class FusedCombine(torch.autograd.Function):
    """A trainer's combine: its backward is a cached dispatch."""

    @staticmethod
    def forward(ctx, x, handle, buffer, async_finish):
        event = deep_comm.EventOverlap(deep_comm.EventHandle()) if async_finish else None
        combined_x, _, event = buffer.combine(
            x, handle=handle, async_finish=async_finish, previous_event=event,
            allocate_on_comm_stream=async_finish,
        )  # fmt: skip
        if async_finish:
            event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.async_finish = buffer, handle, async_finish
        return combined_x

    @staticmethod
    def backward(ctx, grad):
        event = deep_comm.EventOverlap(deep_comm.EventHandle()) if ctx.async_finish else None
        grad_x, _, _, _, _, event = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, previous_event=event,
            async_finish=ctx.async_finish, allocate_on_comm_stream=ctx.async_finish,
        )  # fmt: skip
        if ctx.async_finish:
            event.current_stream_wait()
        return grad_x, None, None, None


@pytest.mark.parametrize("async_finish", [False, True])
def test_trainer_forward_and_backward(async_finish: bool) -> None:
    """Against the gradients of the same layer written densely."""

    def fn(group):
        rank, num_ranks = group.rank(), group.size()
        with deep_comm.Buffer(group, 8 << 20, 0, device="cpu") as buffer:
            x, topk_idx, weights = routed(rank, 9 + 2 * rank)
            x.requires_grad_()
            weights.requires_grad_()
            recv_x, recv_idx, recv_probs, counts, handle = FusedDispatch.apply(
                x, topk_idx, weights, buffer, async_finish
            )
            first = first_expert(rank, NUM_EXPERTS, num_ranks)
            scale = torch.where(recv_idx >= 0, (recv_idx + first + 1) * recv_probs, 0.0)
            rows = (recv_x.float() * scale.sum(dim=1, keepdim=True)).to(torch.bfloat16)
            out = FusedCombine.apply(rows, handle, buffer, async_finish)
            out.sum().backward()

            dense_x = x.detach().clone().requires_grad_()
            dense_weights = weights.detach().clone().requires_grad_()
            dense_layer(dense_x, topk_idx, dense_weights).sum().backward()
            assert torch.equal(x.grad, dense_x.grad)
            assert torch.equal(weights.grad, dense_weights.grad)
            assert int(counts.sum()) == int((recv_idx >= 0).sum())

    local.run(fn, 4, timeout_s=120)


def test_buffer_size_from_the_configs_of_both_directions() -> None:
    """The sizing that callers do: the larger hint of the two recommended configs is enough."""

    def fn(group):
        num_ranks = group.size()
        hidden_bytes = HIDDEN * 2
        num_nvl_bytes = num_rdma_bytes = 0
        for config in (
            deep_comm.Buffer.get_dispatch_config(num_ranks),
            deep_comm.Buffer.get_combine_config(num_ranks),
        ):
            num_nvl_bytes = max(
                config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks), num_nvl_bytes
            )
            num_rdma_bytes = max(
                config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks), num_rdma_bytes
            )
        assert num_rdma_bytes == 0
        with deep_comm.Buffer(group, num_nvl_bytes, num_rdma_bytes, device="cpu") as buffer:
            x, topk_idx, weights = routed(group.rank(), 20)
            result = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS,
                config=deep_comm.Buffer.get_dispatch_config(num_ranks),
            )  # fmt: skip
            recv_x, _, _, counts, handle, event = result
            assert event.event is None
            rank_prefix_matrix, *_ = handle
            assert torch.equal(rank_prefix_matrix, handle[0])
            assert int(handle[0][num_ranks - 1][group.rank()]) == recv_x.shape[0]

    local.run(fn, 2, timeout_s=120)


def test_server_pads_counts_to_the_alignment_of_its_matrix_products() -> None:
    def fn(group):
        with deep_comm.Buffer(group, 8 << 20, device="cpu") as buffer:
            x, topk_idx, weights = routed(group.rank(), 30)
            fp8 = x.to(torch.float8_e4m3fn)
            scales = torch.ones(2, 30).t()  # column-major, as block-scaled kernels want them
            assert not scales.is_contiguous()
            recv, _, _, counts, _, _ = buffer.dispatch(
                (fp8, scales), topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS,
                expert_alignment=128,
            )  # fmt: skip
            assert all(count % 128 == 0 for count in counts)
            assert recv[0].dtype == torch.float8_e4m3fn and recv[1].is_contiguous()

    local.run(fn, 2, timeout_s=120)
