"""Low-latency calls of which one rank ends at a chosen stage, and what the others must get."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from low_latency import LowLatencyCase, Pair, Received, expert_rows, inputs_of
from payload import assert_same_bits
from torch import Tensor

from deep_comm import Buffer
from deep_comm import reference_low_latency as reference
from deep_comm.topology import first_expert, num_local_experts

NUM_CALLS, LAST_CALL, DEAD = 5, 2, 1  # the dead rank ends in the third call
STAGES = ("before dispatch", "in dispatch", "after dispatch", "in combine", "after combine")
DEADLINE_S = 3.0  # a living rank on a busy machine must not run into it


def case_of(**changes: Any) -> LowLatencyCase:
    settings = dict(
        tokens=(5, 4, 6), max_tokens=6, hidden=128, experts=7, topk=3, calls=NUM_CALLS,
        routing="random", mode="hook",
    )  # fmt: skip
    return LowLatencyCase(**{**settings, **changes})


def run_until(buffer: Buffer, case: LowLatencyCase, stage: str, die: Callable[[], None]) -> list:
    """Pairs of calls; the dead rank's `die` raises or never returns. By call: (received, mask,
    seconds)."""
    results = []
    for call in range(case.calls):
        started = time.monotonic()
        is_last = buffer.rank == DEAD and call == LAST_CALL
        pair = Pair(buffer, case, call)
        if is_last and stage == "before dispatch":
            die()
        hook = pair.dispatch()
        if is_last and stage == "in dispatch":
            die()
        hook()
        if is_last and stage == "after dispatch":
            die()
        hook = pair.combine()
        if is_last and stage == "in combine":
            die()
        hook()
        if is_last and stage == "after combine":
            die()
        mask = torch.full((case.num_ranks,), 7, dtype=torch.int32, device=buffer.device)
        buffer.low_latency_query_mask_buffer(mask)
        results.append((pair.received(), mask.tolist(), time.monotonic() - started))
    return results


def without(case: LowLatencyCase, idx: Tensor) -> Tensor:
    """Selections of the dead rank's experts are none."""
    first = first_expert(DEAD, case.experts, case.num_ranks)
    last = first + num_local_experts(DEAD, case.experts, case.num_ranks)
    return torch.where((idx >= first) & (idx < last), -1, idx)


def verify_survivors(case: LowLatencyCase, results: list, stage: str) -> None:
    """`results` by rank, of the dead one anything."""
    for call in range(case.calls):
        xs, idxs, weights = map(
            list, zip(*(inputs_of(case, r, call) for r in range(case.num_ranks)), strict=True)
        )
        # Where the dead rank still sends, its rows count: it has announced them in full.
        sends = call < LAST_CALL or (call == LAST_CALL and stage != "before dispatch")
        returns = call < LAST_CALL or (
            call == LAST_CALL and stage in ("in combine", "after combine")
        )
        if not sends:
            xs[DEAD], weights[DEAD] = xs[DEAD][:0], weights[DEAD][:0]
            idxs[DEAD] = idxs[DEAD][:0]
        options = dict(
            num_max_tokens=case.max_tokens, num_experts=case.experts, use_fp8=case.use_fp8,
            compact=case.compact,
        )  # fmt: skip
        dispatched = reference.low_latency_dispatch(xs, idxs, topk_weights=weights, **options)
        rows = [expert_rows(case, rank, call) for rank in range(case.num_ranks)]
        if returns:
            combined = reference.low_latency_combine(
                rows, dispatched, weights, compact=case.compact, one_rounding=case.one_rounding
            )
        else:
            live = reference.low_latency_dispatch(
                xs, [without(case, idx) for idx in idxs], topk_weights=weights, **options
            )
            # A survivor's rows lie where it has them, with the dead rank's rows or without.
            for rank in range(case.num_ranks):
                if rank == DEAD:
                    continue
                live[rank] = dispatched[rank]
            combined = reference.low_latency_combine(
                rows, live, weights, compact=case.compact, one_rounding=case.one_rounding
            )
        for rank in range(case.num_ranks):
            if rank == DEAD:
                continue
            got, mask, elapsed_s = results[rank][call]
            what = f"{stage}, rank {rank}, call {call}"
            verify_rows(case, got, dispatched[rank], what)
            assert_same_bits(got.combined_x, combined[rank], f"{what}: combined_x")
            noticed = call > LAST_CALL or (call == LAST_CALL and not returns)
            assert mask == [int(noticed and peer == DEAD) for peer in range(case.num_ranks)], what


def verify_rows(
    case: LowLatencyCase, got: Received, want: reference.LowLatencyDispatched, what: str
) -> None:
    assert got.recv_count.tolist() == want.recv_count.tolist(), what
    counts = [want.num_recv_tokens] if case.compact else want.recv_count.tolist()
    shape = (len(counts), -1, case.hidden)
    for group, count in enumerate(counts):
        rows, wanted = (part.view(shape)[group][:count] for part in (got.recv_x, want.recv_x))
        assert_same_bits(
            rows.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8), what
        )


def survive(group: Any, case: LowLatencyCase, stage: str, on_gpu: bool = False) -> list:
    device = torch.device("cuda", group.rank()) if on_gpu else torch.device("cpu")
    with Buffer(
        group, 0, case.num_bytes, low_latency_mode=True, device=device, timeout_s=DEADLINE_S,
        enable_shrink=True,
    ) as buffer:  # fmt: skip
        results = run_until(buffer, case, stage, lambda: os._exit(0))
        for _, _, elapsed_s in results[LAST_CALL + 2 :]:
            assert elapsed_s < DEADLINE_S, "later calls wait for nobody"
        return results
