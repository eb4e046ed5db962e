"""Low-latency calls of which ranks end at a chosen stage, and what the others must get."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from low_latency import (
    LowLatencyCase,
    Pair,
    Received,
    expert_rows,
    inputs_of,
    open_buffer,
    verify,
)
from payload import assert_same_bits
from torch import Tensor

from deep_comm import ArgumentError, Buffer, MaskedOut, errors, local, processes, simulate
from deep_comm.ranks.topology import first_expert, num_local_experts
from deep_comm.reference import low_latency as reference

NUM_CALLS, LAST_CALL, DEAD = 5, 2, 1  # the dead ranks end in the third call
STAGES = ("before dispatch", "in dispatch", "after dispatch", "in combine", "after combine")
CLEAN = "before clean"  # another one, of ranks that use their region between calls
DEADLINE_S = 3.0  # a living rank on a busy machine must not run into it


def case_of(**changes: Any) -> LowLatencyCase:
    settings = dict(
        tokens=(5, 4, 6), max_tokens=6, hidden=128, experts=7, topk=3, calls=NUM_CALLS,
        routing="random", mode="hook",
    )  # fmt: skip
    return LowLatencyCase(**{**settings, **changes})


def run_until(
    buffer: Buffer,
    case: LowLatencyCase,
    stage: str,
    die: Callable[[], None],
    dead: Collection[int] = (DEAD,),
) -> list:
    """Pairs of calls; `die` of the dead ranks raises or never returns. By call: (received, mask,
    seconds)."""
    results = []
    for call in range(case.calls):
        started = time.monotonic()
        is_last = buffer.rank in dead and call == LAST_CALL
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
        received = pair.received()
        if stage == CLEAN:
            region = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
            if case.ranks_per_node is None:  # else the network may still read rows there
                region.fill_(0xFF)
            if is_last:
                die()
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
        mask = torch.full((case.num_ranks,), 7, dtype=torch.int32, device=buffer.device)
        buffer.low_latency_query_mask_buffer(mask)
        results.append((received, mask.tolist(), time.monotonic() - started))
    return results


def without(case: LowLatencyCase, idx: Tensor, dead: Collection[int] = (DEAD,)) -> Tensor:
    """Selections of the dead ranks' experts are none."""
    for rank in dead:
        first = first_expert(rank, case.experts, case.num_ranks)
        last = first + num_local_experts(rank, case.experts, case.num_ranks)
        idx = torch.where((idx >= first) & (idx < last), -1, idx)
    return idx


def verify_survivors(
    case: LowLatencyCase, results: list, stage: str, dead: Collection[int] = (DEAD,)
) -> None:
    """`results` by rank, of the dead ones anything."""
    for call in range(case.calls):
        xs, idxs, weights = map(
            list, zip(*(inputs_of(case, r, call) for r in range(case.num_ranks)), strict=True)
        )
        # Where the dead ranks still send, their rows count: they have announced them in full.
        sends = call < LAST_CALL or (call == LAST_CALL and stage != "before dispatch")
        returns = call < LAST_CALL or (
            call == LAST_CALL and stage in ("in combine", "after combine", CLEAN)
        )
        for rank in () if sends else dead:
            xs[rank], weights[rank] = xs[rank][:0], weights[rank][:0]
            idxs[rank] = idxs[rank][:0]
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
                xs, [without(case, idx, dead) for idx in idxs], topk_weights=weights, **options
            )
            # A survivor's rows lie where it has them, with the dead ranks' rows or without.
            for rank in range(case.num_ranks):
                if rank not in dead:
                    live[rank] = dispatched[rank]
            combined = reference.low_latency_combine(
                rows, live, weights, compact=case.compact, one_rounding=case.one_rounding
            )
        for rank in range(case.num_ranks):
            if rank in dead:
                continue
            got, mask, elapsed_s = results[rank][call]
            what = f"{stage}, rank {rank}, call {call}"
            verify_rows(case, got, dispatched[rank], what)
            assert_same_bits(got.combined_x, combined[rank], f"{what}: combined_x")
            noticed = call > LAST_CALL or (call == LAST_CALL and (stage == CLEAN or not returns))
            assert mask == [int(noticed and peer in dead) for peer in range(case.num_ranks)], what


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


def survive(
    group: Any,
    case: LowLatencyCase,
    stage: str,
    on_gpu: bool = False,
    dead: Collection[int] = (DEAD,),
    deadline_s: float = DEADLINE_S,
) -> list:
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    with open_buffer(
        group, case, device=device, timeout_s=deadline_s, enable_shrink=True
    ) as buffer:

        def die() -> None:
            """When all that has been launched has left this rank, which is what the stages mean."""
            if on_gpu:
                torch.cuda.synchronize()
            if case.ranks_per_node is not None:
                buffer.runtime.quiet_rail()
            os._exit(0)

        results = run_until(buffer, case, stage, die, dead)
        for _, _, elapsed_s in results[LAST_CALL + 2 :]:
            assert elapsed_s < deadline_s, "later calls wait for nobody"
        return results


def verify_outcomes(
    case: LowLatencyCase,
    ended: Sequence[processes.Outcome],
    stage: str,
    dead: Collection[int] = (DEAD,),
) -> None:
    """How processes that ran `survive` ended."""
    for outcome in ended:
        if outcome.rank not in dead:
            assert outcome.error is None, f"{outcome.error}\n{outcome.traceback}"
    verify_survivors(case, [outcome.value for outcome in ended], stage, dead)


class Gone(Exception):
    """The rank ends here; its threads go on elsewhere."""


def simulate_survivors(
    case: LowLatencyCase, stage: str, seed: int, dead: Collection[int] = (DEAD,)
) -> None:
    """`survive` of simulated ranks under one schedule, verified."""

    def leave() -> None:
        raise Gone

    def main(group: simulate.SimulatedGroup) -> list:
        buffer = open_buffer(group, case, timeout_s=1000, enable_shrink=True)
        buffer.runtime.low_latency_hand_on_tokens = case.hand_on
        try:
            return run_until(buffer, case, stage, leave, dead)
        except Gone:
            return []

    try:
        results = simulate.run(main, case.num_ranks, seed, on_stuck="clock", timeout_s=120)
        verify_survivors(case, list(results), stage, dead)
    except (AssertionError, errors.DeepCommError, simulate.MachineError) as error:
        raise AssertionError(f"seed {seed}, dead {dead}: {error}") from error


# ---- a rank that stops anywhere -----------------------------------------------------------------

_PIECE = 8  # columns that are added together


def masks_of(buffer: Buffer) -> list[int]:
    mask = torch.full((buffer.group_size,), 7, dtype=torch.int32, device=buffer.device)
    buffer.low_latency_query_mask_buffer(mask)
    return mask.tolist()


def notices_stop(
    case: LowLatencyCase,
    dead: int,
    step: int,
    seed: int,
    faults: tuple[str, ...] = (),
    num_steps: int = 0,
) -> str | None:
    """How the others fail when a simulated rank stops at a step, for num_steps or (0) for ever, or
    None if they do not."""
    slowest_ns = [0] * case.num_ranks

    def main(group: simulate.SimulatedGroup) -> list:
        buffer = open_buffer(group, case, timeout_s=1000, enable_shrink=True)
        results = []
        for call in range(case.calls):
            started_ns = group.simulation.time_ns
            pair = Pair(buffer, case, call)
            pair.dispatch()
            pair.combine()
            elapsed_ns = group.simulation.time_ns - started_ns
            slowest_ns[buffer.rank] = max(slowest_ns[buffer.rank], elapsed_ns)
            results.append((pair.received(), masks_of(buffer)))
        return results

    ended = simulate.run(
        main, case.num_ranks, seed, on_stuck="clock", timeout_s=60, return_errors=True,
        stalls=[(dead, step, num_steps)], faults=faults,
    )  # fmt: skip
    for rank, result in enumerate(ended):
        if rank != dead and not isinstance(result, list):
            return f"rank {rank}: {result!r}"
    try:
        verify_any_stop([case] * case.calls, list(ended), dead)
    except AssertionError as error:
        return str(error)
    slowest_s = max(slowest_ns[rank] for rank in range(case.num_ranks) if rank != dead) / 1e9
    return None if slowest_s < 4500 else f"a pair took {slowest_s} s, of a timeout of 1000"


def verify_any_stop(cases: Sequence[LowLatencyCase], results: list, dead: int) -> int:
    """`cases` by call, `results` by rank, by call (received, mask); `dead` has stopped at some
    step, maybe in the middle of a kernel. What a survivor gets of the others is as if nothing had
    happened; of the dead rank it has all or, in the call that masks it, parts; later nothing.
    Returns how many calls ended without it.
    """
    survivors = [rank for rank in range(cases[0].num_ranks) if rank != dead]
    num_without = 0
    for call, case in enumerate(cases):
        ranks = range(case.num_ranks)
        xs, idxs, weights = map(list, zip(*(inputs_of(case, r, call) for r in ranks), strict=True))
        options = dict(num_max_tokens=case.max_tokens, num_experts=case.experts)

        def dispatched(xs: list, idxs: list, weights: list, options: Any = options) -> list:
            return reference.low_latency_dispatch(xs, idxs, topk_weights=weights, **options)

        full = dispatched(xs, idxs, weights)
        none = [part[dead][:0] for part in (xs, idxs, weights)]
        less = dispatched(
            *([*part[:dead], empty, *part[dead + 1 :]]
              for part, empty in zip((xs, idxs, weights), none, strict=True))
        )  # fmt: skip
        rows = [expert_rows(case, rank, call) for rank in ranks]
        layouts = list(full)
        masks = [results[rank][call][1] for rank in survivors]
        for rank in survivors:
            got, _ = results[rank][call]
            what = f"rank {rank}, call {call}"
            counts = got.recv_count.tolist()
            has_all = counts == full[rank].recv_count.tolist()
            if not has_all:
                assert counts == less[rank].recv_count.tolist(), what
                layouts[rank] = less[rank]
            verify_live_rows(case, got, layouts[rank], dead if has_all else -1, what)
        with_dead = reference.low_latency_combine(
            rows, layouts, weights, one_rounding=case.one_rounding
        )
        live = dispatched(xs, [without(case, idx, (dead,)) for idx in idxs], weights)
        live = [live[rank] if rank == dead else layouts[rank] for rank in ranks]
        without_dead = reference.low_latency_combine(
            rows, live, weights, one_rounding=case.one_rounding
        )
        before = call == 0 or not any(results[survivors[0]][call - 1][1])
        for rank in survivors:
            got, mask = results[rank][call]
            what = f"rank {rank}, call {call}, mask {mask}"
            assert all(not is_masked or peer == dead for peer, is_masked in enumerate(mask)), what
            pieces = [
                part.contiguous().view(torch.int16).view(-1, _PIECE)
                for part in (got.combined_x, with_dead[rank], without_dead[rank])
            ]
            has_it = (pieces[0] == pieces[1]).all(dim=1)
            is_without = (pieces[0] == pieces[2]).all(dim=1)
            assert bool((has_it | is_without).all()), f"{what}: combined_x"
            assert mask[dead] or bool(has_it.all()), f"{what}: lost something and does not say so"
            if not before:
                assert bool(is_without.all()), f"{what}: something of the masked rank"
        if call > 0 and any(mask[dead] for mask in masks):
            num_without += 1
    # In the call in which a rank stops only those know that waited for it, in the next one all do.
    by_call = [[results[rank][call][1] for rank in survivors] for call in range(len(cases))]
    for before, masks in itertools.pairwise(by_call):
        is_known = any(mask[dead] for mask in before)
        assert not is_known or all(mask == masks[0] for mask in masks), "survivors agree"
    return num_without


def verify_live_rows(
    case: LowLatencyCase, got: Received, want: reference.LowLatencyDispatched, dead: int, what: str
) -> None:
    """Rows of every source but `dead`, whose rows may have no content."""
    got_x, want_x = (part.view(-1, case.num_ranks * case.max_tokens, case.hidden)
                     for part in (got.recv_x, want.recv_x))  # fmt: skip
    assert torch.equal(got.layout_range, want.layout_range), what
    for expert, ranges in enumerate(want.layout_range.tolist()):
        for source, packed in enumerate(ranges):
            first, count = packed >> 32, packed & 0xFFFFFFFF
            if source == dead:
                continue
            where = f"{what}: expert {expert}, source {source}"
            assert_same_bits(got_x[expert, first : first + count],
                             want_x[expert, first : first + count], where)  # fmt: skip


# ---- what a masked rank still sends -------------------------------------------------------------


def send_late(
    case: LowLatencyCase,
    other: LowLatencyCase,
    stage: str,
    late: int,
    faults: tuple[str, ...] = (),
) -> None:
    """A simulated rank sends its second dispatch, or combine's rows of it, when the others have
    masked it and go on with `other`, into the half that they use next.
    """
    masked_in = 1
    cases = [case if call <= masked_in else other for call in range(case.calls)]
    largest = max((case, other), key=lambda each: each.num_bytes)

    def main(group: simulate.SimulatedGroup) -> list:
        buffer = open_buffer(group, largest, timeout_s=1000, enable_shrink=True)
        results = []
        for call, each in enumerate(cases):
            if call == masked_in + 2:
                group.barrier()  # now it sends
                group.barrier()
            pair = Pair(buffer, each, call)
            is_late = buffer.rank == late and call == masked_in
            if is_late and stage == "in dispatch":
                group.barrier()
            receive = pair.dispatch()
            if is_late and stage == "in combine":
                receive()
                group.barrier()
                pair.combine()
            if is_late:
                if case.ranks_per_node is not None:
                    buffer.runtime.quiet_rail()
                group.barrier()
                return []
            receive()
            pair.combine()()
            results.append((pair.received(), masks_of(buffer)))
        return results

    results = simulate.run(
        main, case.num_ranks, case.seed, on_stuck="clock", timeout_s=60, faults=faults
    )
    assert verify_any_stop(cases, list(results), late) == case.calls - masked_in


def send_rows_late(seed: int, ranks_per_node: int | None, faults: tuple[str, ...] = ()) -> None:
    """`send_late` of combine's rows; the others go on with the same shape."""
    case = LowLatencyCase(
        (4, 3, 4, 2), 4, hidden=64, experts=9, topk=3, calls=5, mode="hook", weights_ahead=True,
        one_rounding=True, ranks_per_node=ranks_per_node, seed=seed,
    )  # fmt: skip
    send_late(case, case, "in combine", 3, faults)


def send_late_after_change(
    seed: int, stage: str, ranks_per_node: int | None, faults: tuple[str, ...] = ()
) -> None:
    """`send_late` when the others go on with another shape, in which places of the late rank could
    be those of another one.
    """
    choose = random.Random(seed)
    hidden, other_hidden = choose.choice(((64, 256), (64, 192), (256, 64), (192, 128)))
    case = LowLatencyCase(
        choose.choice(((4, 3, 4, 2), (2, 4, 1, 4))), 4, hidden=hidden, experts=9, topk=3, calls=6,
        mode="hook", weights_ahead=seed % 2 == 0, one_rounding=seed % 3 == 0,
        ranks_per_node=ranks_per_node, seed=seed,
    )  # fmt: skip
    other = dataclasses.replace(case, hidden=other_hidden, max_tokens=4 + seed % 4)
    send_late(case, other, stage, choose.choice((1, 2)), faults)


def notices_late_rows(seed: int, ranks_per_node: int | None) -> bool:
    """With places that depend on the shape. Not of a dispatch, whose late words say where rows go:
    they would be written anywhere.
    """
    try:
        send_late_after_change(seed, "in combine", ranks_per_node, ("packed_sources",))
    except (AssertionError, errors.DeepCommError):
        return True
    return False


# ---- by hand, and back again --------------------------------------------------------------------


def notices_shared_rows(run: Callable[[int, tuple[str, ...]], None], seed: int) -> bool:
    """Whether ``run(seed, faults)`` finds that ranks share a place for what comes late."""
    try:
        run(seed, ("shared_rows",))
    except AssertionError as error:
        return "combined_x" in str(error) or "masked rank" in str(error)
    return False


def come_back_after_clean(case: LowLatencyCase) -> None:
    """Threads, of which one is slow: it learns that it is out, and a clean takes it back."""
    went_on = threading.Semaphore(0)

    def run_pair(buffer: Buffer, call: int) -> Received:
        pair = Pair(buffer, case, call)
        pair.dispatch()()
        pair.combine()()
        return pair.received()

    def main(group: local.ThreadGroup) -> list[Received]:
        with open_buffer(group, case, timeout_s=2.0, enable_shrink=True) as buffer:
            run_pair(buffer, 0)
            if buffer.rank == DEAD:
                assert all(went_on.acquire(timeout=60) for _ in range(case.num_ranks - 1))
                with pytest.raises(MaskedOut):
                    for _ in range(2):
                        run_pair(buffer, 1)
            else:
                run_pair(buffer, 1)
                assert masks_of(buffer) == [int(rank == DEAD) for rank in range(case.num_ranks)]
                went_on.release()
            group.barrier()
            buffer.low_latency_clean_mask_buffer()
            results = [run_pair(buffer, call) for call in (1, 0, 1)]
            assert masks_of(buffer) == [0] * case.num_ranks
            return results[1:]

    verify(case, local.run(main, case.num_ranks, timeout_s=120))


def mask_by_hand(case: LowLatencyCase) -> None:
    """Threads that mask one that never calls, and take it back; and what they must not give."""

    def main(group: local.ThreadGroup) -> None:
        with open_buffer(group, case, timeout_s=20, enable_shrink=True) as buffer:
            for wrong in (buffer.rank, case.num_ranks, -1, "1"):
                with pytest.raises(ArgumentError, match="rank_to_mask"):
                    buffer.low_latency_update_mask_buffer(wrong, True)
            with pytest.raises(ArgumentError, match="mask_status"):
                buffer.low_latency_query_mask_buffer(torch.zeros(case.num_ranks))
            if buffer.rank == DEAD:
                return
            buffer.low_latency_update_mask_buffer(DEAD, True)
            assert masks_of(buffer) == [int(rank == DEAD) for rank in range(case.num_ranks)]
            started = time.monotonic()
            pair = Pair(buffer, case, 0)
            pair.dispatch()
            pair.combine()
            buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
            assert time.monotonic() - started < 10, "nobody is waited for"
            hook = Pair(buffer, dataclasses.replace(case, mode="hook"), 0).dispatch()
            with pytest.raises(ArgumentError, match="before a rank is taken back"):
                buffer.low_latency_update_mask_buffer(DEAD, False)
            hook()
            buffer.low_latency_update_mask_buffer(DEAD, False)
            assert masks_of(buffer) == [0] * case.num_ranks

    local.run(main, case.num_ranks, timeout_s=60)
