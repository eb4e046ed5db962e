"""test_trace.py on GPUs; every rank is a process."""

import functools

import gpu_cases
import over_nvshmem
import pytest
import torch
import tracing
from gpu_cases import on_own_device

run = functools.partial(gpu_cases.run, variables={}, timeout_s=200)


@pytest.mark.gpu
def test_blocks_of_dispatch_and_combine_note_their_steps() -> None:
    recordings = run(on_own_device, 2, tracing.normal_calls, 3)
    for kernel in ("notify_dispatch", "dispatch", "combine"):
        tracing.require_steps(recordings, kernel, 3)
    print(tracing.require_merged(recordings))


@pytest.mark.gpu
def test_blocks_of_low_latency_calls_note_their_steps() -> None:
    from deep_comm import _cuda

    if not _cuda.Engine.traces_low_latency:
        pytest.skip("needs a build with DEEP_COMM_TRACE_LOW_LATENCY=ON")
    recordings = run(on_own_device, 2, tracing.low_latency_calls, 3)
    for kernel in ("low_latency_dispatch", "low_latency_combine"):
        tracing.require_steps(recordings, kernel, 3)
    print(tracing.require_merged(recordings))


@pytest.mark.gpu
def test_a_time_out_tells_where_each_block_was() -> None:
    stories = run(on_own_device, 2, tracing.late_combine, 1, torch.distributed.barrier)
    assert stories[1] == ""
    assert "combine number 3:" in stories[0]
    assert "last step 'begun', then gave up waiting for rank 1" in stories[0]


def _require_internode(run, rail: str) -> None:
    calls = functools.partial(tracing.internode_calls, rail=rail)
    recordings = run(on_own_device, 2, calls, 3)
    for kernel in ("internode_notify", "internode_dispatch", "internode_combine"):
        tracing.require_steps(recordings, kernel, 3)
    print(tracing.require_merged(recordings))


@pytest.mark.gpu
def test_blocks_of_calls_between_nodes_note_their_steps() -> None:
    _require_internode(run, "software")


@pytest.mark.gpu
@over_nvshmem.needs_nvshmem
def test_over_nvshmem_too() -> None:
    _require_internode(over_nvshmem.run, "nvshmem")
