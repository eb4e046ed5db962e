"""test_trace.py on GPUs; every rank is a process."""

import gpu_pool
import pytest
import test_nvshmem_gpu as over_nvshmem
import torch
import tracing


def run(fn, *args: object) -> list:
    return gpu_pool.shared().run(fn, 2, *args, backend="gloo", devices=range(2), timeout_s=200)


def _normal(group, num_calls: int):
    return tracing.normal_calls(group, torch.device("cuda", group.rank()), num_calls)


def _low_latency(group, num_calls: int):
    return tracing.low_latency_calls(group, torch.device("cuda", group.rank()), num_calls)


def _late(group) -> str:
    def end(group) -> None:
        torch.distributed.barrier(group)

    return tracing.late_combine(group, torch.device("cuda", group.rank()), 1, end)


@pytest.mark.gpu
def test_blocks_of_dispatch_and_combine_note_their_steps() -> None:
    recordings = run(_normal, 3)
    for kernel in ("notify_dispatch", "dispatch", "combine"):
        tracing.require_steps(recordings, kernel, 3)
    print(tracing.require_merged(recordings))


@pytest.mark.gpu
def test_blocks_of_low_latency_calls_note_their_steps() -> None:
    from deep_comm import _cuda

    if not _cuda.Engine.traces_low_latency:
        pytest.skip("needs a build with DEEP_COMM_TRACE_LOW_LATENCY=ON")
    recordings = run(_low_latency, 3)
    for kernel in ("low_latency_dispatch", "low_latency_combine"):
        tracing.require_steps(recordings, kernel, 3)
    print(tracing.require_merged(recordings))


@pytest.mark.gpu
def test_a_time_out_tells_where_each_block_was() -> None:
    stories = run(_late)
    assert stories[1] == ""
    assert "combine number 3:" in stories[0]
    assert "last step 'begun', then gave up waiting for rank 1" in stories[0]


def _internode(group, num_calls: int, rail: str):
    device = torch.device("cuda", group.rank())
    return tracing.internode_calls(group, device, num_calls, rail=rail)


def _require_internode(recordings: list) -> None:
    for kernel in ("internode_notify", "internode_dispatch", "internode_combine"):
        tracing.require_steps(recordings, kernel, 3)
    print(tracing.require_merged(recordings))


@pytest.mark.gpu
def test_blocks_of_calls_between_nodes_note_their_steps() -> None:
    _require_internode(run(_internode, 3, "software"))


@pytest.mark.gpu
@over_nvshmem.needs_nvshmem
def test_over_nvshmem_too() -> None:
    _require_internode(over_nvshmem.run(_internode, 2, 3, "nvshmem"))
