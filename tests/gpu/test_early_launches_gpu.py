"""Low-latency launches back to back on GPUs, where each begins while the one before it ends.

Without DEEP_COMM_POISON: its fills would stand between the launches.
"""

import functools
import threading
import time

import gpu_cases
import low_latency_chains as chains
import pytest
import torch

import deep_comm

run = functools.partial(gpu_cases.run, variables={}, timeout_s=200)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_pairs_with_nothing_between_them(num_ranks: int, captured: bool, hooked: bool) -> None:
    run(chains.run_chains, num_ranks, "cuda", 1, 24, hooked, captured)


@pytest.mark.parametrize("captured", [False, True])
def test_two_buffers_whose_operations_fit_together(num_ranks: int, captured: bool) -> None:
    """One operation of each leaves no room for the launch behind it: if that came early, ranks
    that began with different Buffers would wait for each other's SMs, until the deadline."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count // 2 - 2
    variables = {"DEEP_COMM_NUM_SMS": str(num_sms)}
    run(chains.run_chains, num_ranks, "cuda", 2, 24, False, captured, variables=variables)


SLEEP_CYCLES = 50_000_000  # some 30 ms, a thousand launches


def _neighbours(group, captured: bool) -> None:
    """Launches behind a launch that lets them begin early, and behind what other kernels still
    write or read at that moment."""
    device = torch.device("cuda", torch.cuda.current_device())
    rank, size = group.rank(), group.size()
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(chains.M, chains.H, size, chains.E)
    buffer = deep_comm.Buffer(group, 0, num_bytes, low_latency_mode=True, device=device)
    _, idx, weights = chains.inputs_of(rank, 0, 0, device)
    good = torch.randn(idx.shape[0], chains.H, device=device).bfloat16()
    expected = chains.pair(buffer, (good, idx, weights), False)
    x, out, kept = torch.zeros_like(good), torch.zeros_like(good), torch.ones_like(good)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    results: list[torch.Tensor] = []

    def body() -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(good)
        chains.pair(buffer, (good, idx, weights), False)  # its last launch lets the next begin
        main.wait_stream(side)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, chains.M, chains.E, use_fp8=False
        )
        torch.cuda._sleep(SLEEP_CYCLES)
        kept.copy_(out)  # combine overwrites what this reads
        buffer.low_latency_combine(rows, idx, weights, handle, out=out)
        results[:] = [out.clone()]

    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=main):
            body()
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            graph.replay()
    else:
        with torch.cuda.stream(main):
            body()
    torch.cuda.synchronize()
    assert torch.equal(results[0], expected), f"rank {rank}: x was read before it was written"
    assert not kept.any(), f"rank {rank}: out was written while it was read"
    buffer.destroy()


@pytest.mark.parametrize("captured", [False, True])
def test_launches_wait_for_all_that_comes_before_them(num_ranks: int, captured: bool) -> None:
    run(_neighbours, num_ranks, captured)


def _threads_of_two_tiers(group) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rank = group.rank()
    buffers = [
        deep_comm.Buffer(
            group, 64 << 20, 64 << 20, device=device, timeout_s=20, ranks_per_node=1
        )
        for _ in range(2)
    ]  # fmt: skip
    x = torch.ones(64, 1024, dtype=torch.bfloat16, device=device)
    idx = torch.arange(64 * 2, device=device).view(64, 2) % (2 * group.size())
    handles = []
    for buffer in buffers:
        received = buffer.dispatch(x, topk_idx=idx, num_experts=2 * group.size())
        handles.append(received[4])
        buffer.combine(received[0], received[4])
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def calls(number: int) -> None:
        try:
            torch.cuda.set_device(device)
            time.sleep(0.05 * ((number + rank) % 2))
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(8):
                    rows, *_ = buffers[number].dispatch(x, handle=handles[number])
                    buffers[number].combine(rows, handles[number])
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if failures:
        raise failures[0]
    for buffer in buffers:
        buffer.destroy()


def test_two_buffers_of_two_tiers_in_threads_that_begin_in_another_order(num_ranks: int) -> None:
    """With the software NIC a launch returns when its kernel has ended, which needs what the peers'
    other thread may be about to launch."""
    run(_threads_of_two_tiers, num_ranks)
