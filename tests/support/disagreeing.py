"""Ranks that do not agree, do not come, or are in one Buffer twice: what each of them must be told.

For groups of threads and of processes, on any device.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_comm
from deep_comm import errors
from deep_comm.ranks import rendezvous
from deep_comm.ranks.rendezvous import Rendezvous

OPERATIONS = (
    "dispatch", "dispatch with a handle", "combine", "barrier", "low_latency_dispatch",
    "low_latency_combine",
)  # fmt: skip
PAIRS = [(one, other) for idx, one in enumerate(OPERATIONS) for other in OPERATIONS[idx + 1 :]]


def tokens(num_tokens: int, num_experts: int, hidden: int = 64, device: Any = "cpu") -> dict:
    return {
        "x": torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=device),
        "topk_idx": (torch.arange(num_tokens, device=device) % num_experts).unsqueeze(1),
        "topk_weights": torch.ones(num_tokens, 1, device=device),
        "num_experts": num_experts,
    }


def _operations(buffer: deep_comm.Buffer) -> dict[str, Callable[[], Any]]:
    """By the name that an error says. After one dispatch of either mode, whose handles they use."""
    given = tokens(5, 6, 512, buffer.device)
    x, idx, weights = given["x"], given["topk_idx"], given["topk_weights"]
    recv_x, *_, handle, _ = buffer.dispatch(**given)
    rows, _, decoded, _, _ = buffer.low_latency_dispatch(x, idx, 5, 6, use_fp8=False)
    return {
        "dispatch": lambda: buffer.dispatch(**given),
        "dispatch with a handle": lambda: buffer.dispatch(x, handle),
        "combine": lambda: buffer.combine(recv_x, handle),
        "barrier": buffer.barrier,
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx, 5, 6, use_fp8=False),
        "low_latency_combine": lambda: buffer.low_latency_combine(rows, idx, weights, decoded),
    }


def _finish(buffer: deep_comm.Buffer) -> None:
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
        buffer.check()


def call_different_operations(
    group: Any,
    device: Any = "cpu",
    deviant: int = 1,
    ranks_per_node: int | None = None,
    timeout_s: float = 0.4,
) -> None:
    """Every pair, one after the other in one Buffer: the deviant rank calls the second. All ranks
    are told of two that differ, by the names that callers know. Pairs to which a rank came too late
    are called again, with more time."""
    left, most_s = PAIRS, 16 * timeout_s
    while left:
        assert timeout_s <= most_s, left
        left = _call_pairs(group, left, device, deviant, ranks_per_node, timeout_s)
        timeout_s *= 4


def _call_pairs(
    group: Any,
    pairs: list[tuple[str, str]],
    device: Any,
    deviant: int,
    ranks_per_node: int | None,
    timeout_s: float,
) -> list[tuple[str, str]]:
    """Those to which a rank came too late."""
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        5, 512, group.size(), 6, ranks_per_node=ranks_per_node
    )
    meeting = Rendezvous(group)
    left = []
    with deep_comm.Buffer(
        group, 64 << 20, num_bytes + (16 << 20) * (ranks_per_node is not None),
        low_latency_mode=True, device=device, timeout_s=timeout_s, ranks_per_node=ranks_per_node,
    ) as buffer:  # fmt: skip
        for pair in pairs:
            told: errors.ConfigMismatch | None = None
            try:
                operations = _operations(buffer)
                _finish(buffer)
                with pytest.raises(errors.ConfigMismatch) as caught:
                    operations[pair[group.rank() == deviant]]()
                    _finish(buffer)
                told = caught.value
            except errors.PeerTimeout:
                pass
            if not all(meeting.all_gather_object(told is not None)):
                left.append(pair)
                buffer.reset()
                continue
            assert told is not None
            is_mixed = any(name.startswith("low_latency") for name in pair)
            if told.field == "the operation":
                assert len(told.values) == 2, (pair, told)
                for rank, name in told.values.items():
                    assert name == pair[rank == deviant], (pair, told)
            else:  # of a rank whose neighbour has been told by another node
                assert ranks_per_node is not None and not is_mixed, (pair, told)
                assert "a rank of another node" in str(told), (pair, told)
            assert told.needs_reset == is_mixed, (pair, told)
            meeting.barrier()
            if is_mixed:
                buffer.reset()
    return left


NUM_BYTES = 128  # of a row


def _rows(rank: int, kind: Any, device: Any) -> Any:
    """Five rows of the kind's dtypes; each byte says whose it is. kind: a dtype, or those of x and
    of its scales."""
    x_type, scale_type = kind if isinstance(kind, tuple) else (kind, None)
    of_rows = torch.arange(5, dtype=torch.uint8, device=device).unsqueeze(1) + 16 * (rank + 1)
    x = of_rows.repeat(1, NUM_BYTES).view(x_type)
    return x if scale_type is None else (x, of_rows.repeat(1, 16).view(scale_type))


def _bytes(given: Any) -> list[torch.Tensor]:
    return [each.view(torch.uint8) for each in (given if isinstance(given, tuple) else [given])]


X, SCALES = "dtype of x", "dtype of the scales"
# What all ranks but one give, what that one does, and what is named. Rows are equally long.
DTYPES: list[tuple[Any, Any, str]] = [
    (torch.bfloat16, torch.float16, X),
    (torch.bfloat16, torch.float32, X),
    (torch.float8_e4m3fn, torch.float8_e5m2, X),
    ((torch.int8, torch.float32), (torch.int8, torch.int32), SCALES),
    ((torch.int8, torch.float32), (torch.int8, torch.int16), SCALES),
    ((torch.int8, torch.float32), torch.int8, SCALES),
    ((torch.int8, torch.float32), (torch.uint8, torch.int32), X),
]


def give_different_dtypes(
    group: Any,
    device: Any = "cpu",
    deviant: int = 1,
    ranks_per_node: int | None = None,
    num_direct_bytes: int | None = None,
    timeout_s: float = 20.0,
) -> None:
    """With new routing and a handle's, in the first call and in later ones. All ranks are told, and
    their next calls move the right bytes."""
    meeting, rank = Rendezvous(group), group.rank()
    num_experts = 2 * group.size()
    routing = tokens(5, num_experts, device=device)
    del routing["x"]
    with deep_comm.Buffer(
        group, 8 << 20, (8 << 20) * (ranks_per_node is not None), num_direct_bytes=num_direct_bytes,
        device=device, timeout_s=timeout_s, ranks_per_node=ranks_per_node,
    ) as buffer:  # fmt: skip

        def refuse(*given: Any, **options: Any) -> errors.ConfigMismatch:
            with pytest.raises(errors.ConfigMismatch) as caught:
                buffer.dispatch(*given, **options)
                _finish(buffer)
            assert not caught.value.needs_reset
            meeting.barrier()
            return caught.value

        def require(received: Any, kind: Any) -> None:
            sent = [_bytes(_rows(source, kind, device)) for source in range(group.size())]
            is_mine = torch.arange(5, device=device) % num_experts // 2 == rank
            for part, got in enumerate(_bytes(received)):
                assert torch.equal(got, torch.cat([rows[part][is_mine] for rows in sent]))

        for right, wrong, field in DTYPES:
            mine = wrong if rank == deviant else right
            told = refuse(_rows(rank, mine, device), **routing)
            assert told.field == field and len(told.values) == 2, told
            for whose, dtype in told.values.items():
                kind = wrong if whose == deviant else right
                dtypes = kind if isinstance(kind, tuple) else (kind, None)
                assert dtype == dtypes[field == SCALES], told
                assert f"rank {whose} has {dtype}" in str(told)
            good = _rows(rank, right, device)
            received, *_, handle, _ = buffer.dispatch(good, **routing)
            require(received, right)
            told = refuse(_rows(rank, mine, device), handle)
            assert told.field == "the arguments of the operation dispatch with a handle", told
            assert "a dtype" in str(told)
            require(buffer.dispatch(good, handle)[0], right)
            _finish(buffer)


def enter_from_a_second_thread(group: Any, device: Any = "cpu") -> list[int]:
    """One comes while another waits for a peer; it is refused, and the other's call goes on."""
    meeting = Rendezvous(group)
    given = tokens(5, 6, 512, device)

    def intrude(buffer: deep_comm.Buffer) -> None:
        while not buffer._context.native_calls.is_in_use:
            time.sleep(0.001)
        for call in (
            lambda: buffer.dispatch(**given),
            lambda: buffer.get_dispatch_layout(given["topk_idx"], 6),
            buffer.barrier,
            buffer.destroy,
        ):
            with pytest.raises(errors.BufferInUse, match="another thread is in a call"):
                call()
        meeting.barrier()  # now the peer may come

    with deep_comm.Buffer(group, 64 << 20, device=device, timeout_s=20) as buffer:
        if group.rank() == 1:
            meeting.barrier()
            counts: list[int] = buffer.dispatch(**given)[3]
            return counts
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            intruder = pool.submit(intrude, buffer)
            counts = buffer.dispatch(**given)[3]
            intruder.result()
            # Another thread may make calls when none is under way.
            pool.submit(buffer.get_dispatch_layout, given["topk_idx"], 6).result()
        return counts


def _elastic(group: Any, device: Any) -> Any:
    from deep_comm.compat.elastic import ElasticBuffer

    return ElasticBuffer(group, 64 << 20, num_gpu_timeout_secs=1, device=device)


def _drop_in(group: Any, device: Any) -> Any:
    from deep_comm.compat.legacy import Buffer

    return Buffer(group, 0, 1 << 20, low_latency_mode=True, device=device, timeout_s=0.5)


def _native(group: Any, device: Any) -> Any:
    return deep_comm.Buffer(group, 1 << 20, device=device, timeout_s=0.5)


def _layer(group: Any, device: Any) -> Any:
    return deep_comm.ExpertParallel(
        group, hidden=64, num_experts=6, num_topk=2, max_tokens=8, device=device, timeout_s=0.5
    )


def build_alone(group: Any, device: Any = "cpu") -> list[float]:
    """Every kind once without a rank, another one each time, and then with all. The seconds that
    this rank waited."""
    found = []
    for number, build in enumerate((_native, _elastic, _drop_in, _layer)):
        missing = number % group.size()
        rendezvous.LEAST_MEETING_S = 0.5
        started = time.monotonic()
        if group.rank() == missing:
            with pytest.raises(errors.ArgumentError):
                deep_comm.Buffer(group, -1, device=device)  # its constructor fails
            time.sleep(2.5)  # and it goes on with something else
        else:
            with pytest.raises(errors.PeerLost, match=f"rank {missing} did not come"):
                build(group, device)
            found.append(time.monotonic() - started)
        rendezvous.LEAST_MEETING_S = 30.0
        build(group, device).destroy()
    return found
