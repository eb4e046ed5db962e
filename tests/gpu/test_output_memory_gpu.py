"""Outputs of one allocation: who keeps their memory, and what happens where there is none."""

import gpu_pool
import pytest
import torch

import deep_comm

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 128, 7168, 4, 16
LATE = 100_000_000  # cycles


def run(fn, num_ranks: int) -> list:
    return gpu_pool.shared().run(fn, num_ranks, devices=range(num_ranks), timeout_s=200)


class Calls:
    def __init__(self, group, buffer: deep_comm.Buffer, device: torch.device) -> None:
        self.buffer, self.num_experts = buffer, EXPERTS_PER_RANK * group.size()
        self.x = torch.full((16, HIDDEN), 1.0 + group.rank(), device=device).bfloat16()
        self.weights = torch.full((16, TOPK), 0.25, device=device)
        idx = torch.arange(16 * TOPK, device=device) * 5 + group.rank()
        self.idx = (idx % self.num_experts).view(16, TOPK)

    def dispatch(self):
        return self.buffer.low_latency_dispatch(
            self.x, self.idx, TOKENS, self.num_experts, topk_weights=self.weights
        )

    def outputs(self) -> dict[str, torch.Tensor]:
        (_, scales), count, handle, _, _ = self.dispatch()
        per_rank, _, per_expert, mask, _ = self.buffer.get_dispatch_layout(
            self.idx, self.num_experts
        )
        return {
            "scales": scales, "count": count, "metadata": handle.metadata, "per_rank": per_rank,
            "per_expert": per_expert, "mask": mask,
        }  # fmt: skip

    def pair(self) -> torch.Tensor:
        (rows, _), _, handle, _, _ = self.dispatch()
        ones = torch.ones(rows.shape, dtype=torch.bfloat16, device=rows.device)
        return self.buffer.low_latency_combine(ones, self.idx, None, handle)[0]


def body(group, what) -> list:
    device = torch.device("cuda", group.rank())
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        TOKENS, HIDDEN, group.size(), EXPERTS_PER_RANK * group.size()
    )
    with deep_comm.Buffer(
        group, 64 << 20, num_bytes, low_latency_mode=True, device=device, timeout_s=60
    ) as buffer:
        calls = Calls(group, buffer, device)
        for _ in range(2):  # first and later calls
            calls.outputs()
            calls.pair()
        found = what(group, calls, device)
        buffer.check()
        return found


def _are_kept_for_other_streams(group) -> list:
    def what(group, calls: Calls, device: torch.device) -> list:
        failed = []
        other = torch.cuda.Stream(device)
        for name in calls.outputs():
            tensor = calls.outputs()[name]
            place = tensor.untyped_storage().data_ptr()
            with torch.cuda.stream(other):
                torch.cuda._sleep(LATE)
            tensor.record_stream(other)
            del tensor
            again = calls.outputs()
            if place in {each.untyped_storage().data_ptr() for each in again.values()}:
                failed.append(name)
            torch.cuda.synchronize(device)
        return failed

    return body(group, what)


def test_memory_that_another_stream_reads_is_not_written(num_ranks: int) -> None:
    assert run(_are_kept_for_other_streams, min(num_ranks, 2)) == [[]] * min(num_ranks, 2)


def _have_no_memory(group) -> list:
    def what(group, calls: Calls, device: torch.device) -> list:
        want = calls.pair().clone()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        few = torch.cuda.memory_reserved(device) + (4 << 20)
        group.barrier()
        try:
            torch.cuda.set_per_process_memory_fraction(few / total, device)
            with pytest.raises(torch.OutOfMemoryError):
                calls.dispatch()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        group.barrier()
        return [torch.equal(calls.pair(), want)]

    return body(group, what)


def test_no_memory_is_torchs_error_and_nothing_was_launched(num_ranks: int) -> None:
    assert run(_have_no_memory, min(num_ranks, 2)) == [[True]] * min(num_ranks, 2)
