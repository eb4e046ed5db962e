"""Two micro-batches at once on GPUs: two streams over one Buffer, and
two Buffers over one group.
"""

import dataclasses

import pytest
import torch
from cases import Case
from gpu_cases import run
from roundtrip import Received, call_once, verify

import deep_comm

LEFT = Case(
    (300, 7, 120, 64, 0, 33, 90, 1), experts=24, topk=4, hidden=2048, seed=1, calls=16,
    num_sms=16, send_chunk=8, slots=32,
)  # fmt: skip
RIGHT = Case(
    (33, 250, 0, 90, 17, 5, 210, 8), experts=40, topk=6, hidden=1024, seed=2, calls=16,
    num_sms=16, send_chunk=4, slots=16, fused_layout=True, biases=1,
)  # fmt: skip


def _pair(num_ranks: int, direct_bytes: int) -> tuple[Case, Case]:
    return tuple(
        dataclasses.replace(
            case, tokens=case.tokens[:num_ranks], nvl_bytes=256 << 20, direct_bytes=direct_bytes
        )
        for case in (LEFT, RIGHT)
    )


def _buffer(group, case: Case, device: torch.device) -> deep_comm.Buffer:
    return deep_comm.Buffer(
        group, case.nvl_bytes, num_direct_bytes=case.direct_bytes, device=device, timeout_s=60
    )


def _interleaved(
    group, pair: tuple[Case, Case], num_buffers: int, options: dict
) -> tuple[list[Received], list[Received]]:
    """Calls of both cases in turn, each case on a stream of its own; nothing orders the streams."""
    device = torch.device("cuda", torch.cuda.current_device())
    first = _buffer(group, pair[0], device)
    second = first if num_buffers == 1 else _buffer(group, pair[1], device)
    streams = [torch.cuda.Stream(device) for _ in pair]
    results: tuple[list[Received], list[Received]] = ([], [])
    for call in range(pair[0].calls):
        for which, buffer in enumerate((first, second)):
            with torch.cuda.stream(streams[which]):
                results[which].append(call_once(buffer, pair[which], call, options))
    torch.cuda.synchronize()
    second.destroy()
    first.destroy()
    return results


@pytest.mark.parametrize("direct_bytes", [0, 128 << 20])
@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("async_finish", [False, True])
def test_two_streams(
    num_ranks: int, num_buffers: int, direct_bytes: int, async_finish: bool
) -> None:
    pair = _pair(num_ranks, direct_bytes)
    options = {"async_finish": True} if async_finish else {}
    results = run(_interleaved, num_ranks, pair, num_buffers, options)
    for which, case in enumerate(pair):
        verify(case, [ranks[which] for ranks in results])


def _extremes(rows: torch.Tensor) -> torch.Tensor:
    """The least and the greatest value of each row: [2, num_rows]."""
    return torch.stack(rows.float().aminmax(dim=1))


def _overlapped(group, num_buffers: int) -> bool:
    """Cached dispatches of one micro-batch beside combines of another, nothing on the host in
    between. Returns whether all rows and sums were right.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    rank, ranks = group.rank(), group.size()
    hidden, tokens, num_calls = 7168, 1024, 40
    config = deep_comm.Config(16, 8, 32)
    buffers = [
        deep_comm.Buffer(group, 512 << 20, device=device, timeout_s=60) for _ in range(num_buffers)
    ]
    dispatching, combining = buffers[0], buffers[-1]
    idx = torch.arange(ranks, device=device).expand(tokens, ranks).contiguous()
    weights = torch.ones(tokens, ranks, device=device)
    x = torch.full((tokens, hidden), float(rank + 1), device=device, dtype=torch.bfloat16)
    routing = dict(topk_idx=idx, topk_weights=weights, num_experts=ranks, config=config)
    handle = dispatching.dispatch(x, **routing)[4]
    rows, _, _, _, other, _ = combining.dispatch(x, **routing)
    rows = rows.clone()
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    group.barrier()
    sent, received, sums = [], [], []
    for call in range(num_calls):
        with torch.cuda.stream(streams[0]):
            payload = x + float(call % 16)
            got = dispatching.dispatch(payload, handle=handle, config=config)[0]
            sent.append(float(call % 16))
            received.append(_extremes(got[:: tokens // 4]))
            del got
        with torch.cuda.stream(streams[1]):
            total = combining.combine(rows, other, config=config)[0]
            sums.append(_extremes(total))
    torch.cuda.synchronize()
    sources = torch.arange(1, ranks + 1, device=device).repeat_interleave(4).float()
    good = all(bool((got == sources + add).all()) for got, add in zip(received, sent, strict=True))
    good = good and all(bool((total == (rank + 1.0) * ranks).all()) for total in sums)
    for buffer in buffers:
        buffer.check()
        buffer.destroy()
    return good


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_dispatch_beside_combine(num_ranks: int, num_buffers: int) -> None:
    assert all(run(_overlapped, num_ranks, num_buffers))
