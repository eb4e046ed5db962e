"""A rank whose calls a signal interrupts while it waits for a silent one: on both targets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_comm
from deep_comm import errors

TIMEOUT_S = 100.0  # of the kernels: what ends sooner was not ended by it
SOON_S = 20.0
SIGNAL_AFTER_S = 0.5

NORMAL, INTERNODE, LOW_LATENCY = "normal", "internode", "low_latency"
TOKENS, HIDDEN = 8, 512


def make(
    group: Any, device: torch.device, mode: str, timeout_s: float = TIMEOUT_S
) -> deep_comm.Buffer:
    low_latency = mode == LOW_LATENCY
    num_rdma_bytes = 0
    if low_latency:
        num_rdma_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
            TOKENS, HIDDEN, group.size(), group.size()
        )
    elif mode == INTERNODE:
        num_rdma_bytes = 8 << 20
    return deep_comm.Buffer(
        group, 8 << 20, num_rdma_bytes, low_latency_mode=low_latency, device=device,
        timeout_s=timeout_s, ranks_per_node=1 if mode == INTERNODE else None,
    )  # fmt: skip


def all_to_all(buffer: deep_comm.Buffer, mode: str, combines: bool = True) -> torch.Tensor | None:
    """A row for every rank, and the sums of what they send back."""
    ranks, device = buffer.group_size, buffer.device
    topk_idx = torch.arange(ranks, device=device).expand(TOKENS, ranks).contiguous()
    weights = torch.ones(TOKENS, ranks, device=device)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    if mode == LOW_LATENCY:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, TOKENS, ranks, use_fp8=False
        )
        return buffer.low_latency_combine(rows, topk_idx, weights, handle)[0] if combines else None
    rows, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=weights, num_experts=ranks
    )
    return buffer.combine(rows, handle)[0] if combines else None


def require_sums(buffer: deep_comm.Buffer, mode: str) -> None:
    total = all_to_all(buffer, mode)
    assert total is not None and bool((total == buffer.group_size).all())


def require_out_of_step(buffer: deep_comm.Buffer, mode: str) -> None:
    with pytest.raises(errors.CallInterrupted, match=r"reset\(\)") as caught:
        all_to_all(buffer, mode, False)
    assert caught.value.rank == buffer.rank


def interrupt_soon() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process inherited
    threading.Timer(SIGNAL_AFTER_S, os.kill, (os.getpid(), signal.SIGINT)).start()


def ended_by_signal(call: Callable[[], object]) -> float:
    """How long the call went on: a wait that a handler's exception ended."""
    began = time.monotonic()
    interrupt_soon()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - began
    raise AssertionError(f"the call ended by itself after {time.monotonic() - began:.1f} s")


def interrupted_then_reset(group: Any, device: Any, mode: str, silent: int, combines: bool) -> None:
    """All ranks but one are interrupted while they wait for that one, in dispatch or in combine;
    then they cannot call; then all go on.
    """
    with make(group, device, mode) as buffer:
        require_sums(buffer, mode)
        if group.rank() != silent:
            lasted = ended_by_signal(lambda: all_to_all(buffer, mode))
            assert lasted < SOON_S, lasted
            require_out_of_step(buffer, mode)
        elif combines:
            all_to_all(buffer, mode, False)  # so that the others come as far as their combine
        dist.barrier(group)
        buffer.reset()
        require_sums(buffer, mode)


def raised_between_launches(group: Any, device: Any, mode: str, failing: int) -> None:
    """A rank gets no memory for rows whose number it has waited for. Peers are in the launch that
    it owes them: they time out, it is told that it is out of step, and all go on after reset().
    """
    make_tensor, has_memory = torch.empty_strided, [True]

    def empty_strided(shape: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if not has_memory[0] and tuple(shape)[1:] == (HIDDEN,):
            raise torch.OutOfMemoryError
        return make_tensor(shape, *rest, **options)

    torch.empty_strided = empty_strided  # a Buffer takes it when it is made
    with make(group, device, mode, timeout_s=3.0) as buffer:
        torch.empty_strided = make_tensor
        require_sums(buffer, mode)
        dist.barrier(group)
        has_memory[0] = group.rank() != failing
        is_failing = group.rank() == failing
        with pytest.raises(torch.OutOfMemoryError if is_failing else errors.PeerTimeout):
            all_to_all(buffer, mode, False)
        has_memory[0] = True
        if is_failing:
            require_out_of_step(buffer, mode)
        dist.barrier(group)
        buffer.reset()
        require_sums(buffer, mode)


def handled_in_the_call(group: Any, device: Any, late: int) -> None:
    """A handler that raises nothing runs while the call waits, and the call goes on. It can neither
    call the Buffer nor end it.
    """
    handled: list[float] = []

    def handler(*_: object) -> None:
        for use in (buffer.destroy, buffer.reset, lambda: all_to_all(buffer, NORMAL, False)):
            with pytest.raises(errors.BufferInUse, match="a signal handler runs while a call"):
                use()
        handled.append(time.monotonic())

    with make(group, device, NORMAL) as buffer:
        all_to_all(buffer, NORMAL)
        dist.barrier(group)
        if group.rank() == late:
            time.sleep(6 * SIGNAL_AFTER_S)
        else:
            interrupt_soon()
            signal.signal(signal.SIGINT, handler)
        require_sums(buffer, NORMAL)
        ended = time.monotonic()
    if group.rank() != late:
        assert len(handled) == 1 and ended - handled[0] > SIGNAL_AFTER_S, (handled, ended)


def interrupted_then_closed(group: Any, device: Any, silent: int) -> None:
    """What a program does that ends: the Buffer's end waits for no peer either."""
    buffer = make(group, device, NORMAL)
    all_to_all(buffer, NORMAL)
    if group.rank() != silent:
        ended_by_signal(lambda: all_to_all(buffer, NORMAL))
        began = time.monotonic()
        buffer.destroy()
        assert time.monotonic() - began < SOON_S
    else:
        buffer.destroy()


def silent_then_reset(group: Any, device: Any, silent: int, timeout_s: float) -> Any:
    """A rank does not come to a dispatch: (peer, stage, word) of the others' PeerTimeout. Then all
    go on."""
    caught = None
    with make(group, device, NORMAL, timeout_s) as buffer:
        require_sums(buffer, NORMAL)
        if group.rank() != silent:
            with pytest.raises(errors.PeerTimeout) as raised:
                all_to_all(buffer, NORMAL, False)
                finish(buffer)
            caught = raised.value.peer, raised.value.stage, raised.value.word
        dist.barrier(group)
        buffer.reset()
        require_sums(buffer, NORMAL)
        finish(buffer)
    return caught


def finish(buffer: deep_comm.Buffer) -> None:
    """What a kernel has met is raised here at the latest."""
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
    buffer.check()
