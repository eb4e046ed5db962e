"""Normal mode goes on without ranks that are gone: Buffer.reset(without=...)."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import forked
import pytest
import torch
from absent import (
    FORMS,
    Plan,
    dispatch_some,
    notices_fault,
    open_buffer,
    plan_of,
    refuse_tensors,
    simulate_plan,
    survive,
    verify_survivors,
)
from cases import Case, without_absent
from run_by import run_by
from schedules import some_of

from deep_comm import Buffer, ExpertParallel, local, simulate
from deep_comm.errors import (
    ArgumentError,
    BufferDestroyed,
    ConfigMismatch,
    HandleMismatch,
    MaskedOut,
    PeerTimeout,
    UnsupportedError,
)

NUM_SEEDS = 360


@pytest.mark.usefixtures("poison")
def test_every_schedule_goes_on_with_the_same_bits() -> None:
    for seed in some_of(range(NUM_SEEDS)):
        plan = plan_of(seed)
        try:
            simulate_plan(plan, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {plan}: {error}") from error


EIGHT = Case(
    (6, 0, 3, 9, 1, 4, 2, 5), hidden=128, experts=19, topk=3, slots=2, send_chunk=1, num_sms=1,
    nvl_bytes=1 << 20, direct_bytes=1 << 19,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gone", [(0,), (1, 2, 3, 4, 5, 6, 7), (0, 3, 7)], ids=str)
def test_eight_ranks_go_on_without_some(gone: tuple[int, ...], form: str) -> None:
    for direct_bytes in (0, EIGHT.direct_bytes):
        case = dataclasses.replace(EIGHT, direct_bytes=direct_bytes)
        simulate_plan(Plan(case, gone, form=form), 5)


def test_simulation_finds_waits_for_absent_ranks() -> None:
    for seed in range(8):
        plan = dataclasses.replace(plan_of(seed), notices=False)
        found = notices_fault(plan, seed, ("await_absent",))
        assert found is not None and "PeerTimeout" in found


@pytest.mark.parametrize("fault", ["weaken_release", "skip_bulk_wait"])
def test_simulation_finds_faults_without_ranks_as_well(fault: str) -> None:
    case = dataclasses.replace(EIGHT, tokens=(9, 0, 12, 7), direct_bytes=0, calls=2)
    plan = Plan(case, (1,))
    assert any(notices_fault(plan, seed, (fault,)) for seed in range(60))


PROCESSES = Case((5, 7, 4, 6), hidden=256, experts=10, topk=3, calls=2, nvl_bytes=8 << 20)


@pytest.mark.parametrize(
    "plan",
    [Plan(PROCESSES, (0, 3), (3,), form="fp8"), Plan(PROCESSES, (0, 1, 3))],
    ids=["two_in_turn", "all_but_one"],
)
def test_processes_go_on_when_some_are_killed(plan: Plan) -> None:
    ended = forked.outcomes(survive, plan.num_ranks, plan, 4.0, False, timeout_s=200)
    verify_survivors(plan, ended)


# ---- the rank that is done without --------------------------------------------------------------


def come_late(group: Any, gone: int, call: str) -> list[Any] | None:
    """A rank that lives calls when the others go on without it; then all begin anew."""
    with open_buffer(group, EIGHT, 30.0, device="cpu") as buffer:
        *_, handle, _ = dispatch_some(buffer)
        group.all_gather_object(None)
        if buffer.rank == gone:
            group.all_gather_object(None)
            rows = torch.ones(handle.num_recv_tokens, 64, dtype=torch.bfloat16)
            calls = {
                "dispatch": lambda: dispatch_some(buffer),
                "combine": lambda: buffer.combine(rows, handle),
                "cached": lambda: buffer.dispatch(torch.ones(4, 64).bfloat16(), handle=handle),
                "reset": lambda: buffer.reset(without=[(gone + 1) % buffer.group_size]),
            }  # fmt: skip
            for _ in range(2):
                with pytest.raises(MaskedOut, match=f"rank {gone}"):
                    calls[call]()
        else:
            buffer.reset(without=[gone])
            group.all_gather_object(None)
            with pytest.raises(HandleMismatch, match="other ranks absent"):
                buffer.combine(torch.ones(handle.num_recv_tokens, 64).bfloat16(), handle)
            refuse_tensors(buffer, tuple(handle), gone)
            recv_x, _, _, _, during, _ = dispatch_some(buffer)
            assert not during.is_token_in_rank[:, gone].any()
            combined, _, _ = buffer.combine(recv_x, during)
            expected = torch.ones(4, 64).bfloat16()
            expected[torch.arange(4) % buffer.group_size == gone] = 0
            assert torch.equal(combined, expected)
            assert torch.equal(buffer.combine(recv_x, tuple(during))[0], expected)
        buffer.reset()
        recv_x, _, _, _, after, _ = dispatch_some(buffer)
        combined, _, _ = buffer.combine(recv_x, after)
        assert torch.equal(combined, torch.ones(4, 64).bfloat16())
        # Those of before are good again, those of meanwhile are not.
        recv_x, *_ = buffer.dispatch(torch.full((4, 64), 2.0).bfloat16(), handle=handle)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, torch.full((4, 64), 2.0).bfloat16())
        if buffer.rank != gone:
            with pytest.raises(HandleMismatch, match="other ranks absent"):
                buffer.combine(recv_x, during)
    return None


@pytest.mark.parametrize("call", ["dispatch", "combine", "cached", "reset"])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_was_left_out_learns_it_and_comes_back(gone: int, call: str) -> None:
    local.run(lambda group: come_late(group, gone, call), 3, timeout_s=100)


def test_a_rank_that_was_left_out_learns_it_under_every_schedule() -> None:
    for seed in some_of(range(40)):
        call = ("dispatch", "combine", "cached", "reset")[seed % 4]
        simulate.run(lambda group, call=call: come_late(group, 1, call), 3, seed, timeout_s=60)


def test_a_rank_that_waits_learns_that_it_is_left_out() -> None:
    has_begun = threading.Event()

    def main(group: local.ThreadGroup) -> None:
        with open_buffer(group, EIGHT, 60.0, device="cpu") as buffer:
            if buffer.rank == 1:
                has_begun.set()
                with pytest.raises(MaskedOut):
                    dispatch_some(buffer)
            else:
                has_begun.wait(30)
                buffer.reset(without=[1])
                dispatch_some(buffer)
            group.barrier()

    local.run(main, 3, timeout_s=30)


def test_a_rank_that_waits_learns_it_under_every_schedule() -> None:
    """What it sees of the others, that they have ended its waits, comes with the reason."""

    def main(group: simulate.SimulatedGroup) -> None:
        with open_buffer(group, EIGHT, 30.0, device="cpu") as buffer:
            if buffer.rank == 1:
                with pytest.raises(MaskedOut):
                    dispatch_some(buffer)
            else:
                buffer.reset(without=[1])
                dispatch_some(buffer)
            group.barrier()

    for seed in some_of(range(40)):
        simulate.run(main, 2, seed, timeout_s=60)


# ---- who comes to a reset, and what they say ----------------------------------------------------


def test_ranks_that_name_different_ranks_are_told() -> None:
    named = {0: [3], 1: [2, 3], 2: [3]}

    def main(group: local.ThreadGroup) -> None:
        with open_buffer(group, EIGHT, 5.0, device="cpu") as buffer:
            if buffer.rank == 3:
                return group.barrier()
            with pytest.raises(ConfigMismatch, match=r"without.*rank 1 has \[2, 3\]") as caught:
                buffer.reset(without=named[buffer.rank])
            assert caught.value.values[buffer.rank] == named[buffer.rank]
            with pytest.raises(ConfigMismatch):  # until there has been a reset
                dispatch_some(buffer)
            group.barrier()  # who names other ranks at once is taken by his new word
            buffer.reset(without=[3])
            dispatch_some(buffer)

    local.run(main, 4, timeout_s=60)


@run_by(local.run, 4, timeout_s=60)
def test_a_rank_that_is_not_named_and_does_not_come_is_named(group: local.ThreadGroup, /) -> None:
    with open_buffer(group, EIGHT, 0.3, device="cpu") as buffer:
        if buffer.rank > 1:
            return group.barrier()
        with pytest.raises(PeerTimeout, match="in reset") as caught:
            buffer.reset(without=[3])
        assert caught.value.peer in (1 - buffer.rank, 2)
        if buffer.rank == 0:  # has tried once more than the other one
            with pytest.raises(PeerTimeout, match="in reset"):
                buffer.reset(without=[3])
        group.barrier()
        buffer.reset(without=[2, 3])
        dispatch_some(buffer)


@pytest.mark.parametrize("faults", [(), ("keep_proposal",)])
def test_what_a_rank_said_before_it_gave_up_counts_no_more(faults: tuple[str, ...]) -> None:
    expected = ConfigMismatch if faults else PeerTimeout

    def main(group: simulate.SimulatedGroup) -> None:
        buffer = open_buffer(group, EIGHT, 10.0, device="cpu")
        if buffer.rank == 0:
            with pytest.raises(PeerTimeout, match="in reset"):
                buffer.reset(without=[3])
        group.barrier()
        if buffer.rank == 1:
            with pytest.raises(expected):
                buffer.reset(without=[2, 3])

    for seed in range(4):
        simulate.run(main, 4, seed, faults=faults, on_stuck="clock", timeout_s=60)


def test_ranks_may_try_again_under_every_schedule() -> None:
    """Some have met in vain before the others come."""

    def main(group: simulate.SimulatedGroup) -> None:
        buffer = open_buffer(group, EIGHT, 10.0, device="cpu")
        if buffer.rank == 3:
            return
        for _ in range(20):
            try:
                buffer.reset(without=[3])
                if buffer.rank == 2 and buffer._context._absence.last_shrink_barrier < 3:
                    continue  # comes twice
                dispatch_some(buffer)
                return
            except PeerTimeout:
                pass
        raise AssertionError("never met")

    for seed in some_of(range(40)):
        simulate.run(main, 4, seed, on_stuck="clock", timeout_s=60)


@run_by(local.run, 2, timeout_s=60)
def test_arguments(group: local.ThreadGroup, /) -> None:
    with open_buffer(group, EIGHT, 5.0, device="cpu") as buffer:
        other = 1 - buffer.rank
        for wrong in ([buffer.rank], [-1], [2], ["1"], [True], 1, [other, 7]):
            with pytest.raises(ArgumentError, match="without"):
                buffer.reset(without=wrong)  # type: ignore[arg-type]
        dispatch_some(buffer)  # nothing has happened
        buffer.reset(without=[])
        dispatch_some(buffer)
    with pytest.raises(BufferDestroyed):
        buffer.reset(without=[other])


@run_by(local.run, 4, timeout_s=60)
def test_two_nodes_are_refused_by_name(group: local.ThreadGroup, /) -> None:
    with (
        Buffer(group, 1 << 20, 1 << 20, device="cpu", ranks_per_node=2) as buffer,
        pytest.raises(UnsupportedError, match="inside one node"),
    ):
        buffer.reset(without=[(buffer.rank + 1) % 4])


def test_a_layout_of_before_leaves_the_absent_rank_out() -> None:
    for seed in some_of(range(10)):

        def main(group: simulate.SimulatedGroup) -> None:
            buffer = open_buffer(group, EIGHT, 10.0, device="cpu")
            x = torch.full((6, 64), 1.0 + buffer.rank).bfloat16()
            idx = torch.arange(12).view(6, 2) % 3
            per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, 3)
            group.barrier()
            if buffer.rank == 2:
                return
            buffer.reset(without=[2])
            for expand in (False, True):
                recv_x, *_, handle, _ = buffer.dispatch(
                    x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert,
                    is_token_in_rank=mask, topk_idx=idx, expand=expand,
                )  # fmt: skip
                combined, _, _ = buffer.combine(recv_x, handle)
                live = (idx < 2).sum(1, keepdim=True)
                assert torch.equal(combined, (x.float() * live).bfloat16()), (combined, live)

        simulate.run(main, 3, seed, timeout_s=60)


# ---- beside low-latency calls -------------------------------------------------------------------


def low_latency_pair(buffer: Buffer) -> torch.Tensor:
    num_ranks = buffer.group_size
    x = torch.ones(num_ranks, 128).bfloat16()
    idx = torch.arange(num_ranks).view(num_ranks, 1)
    weights = torch.ones(num_ranks, 1)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, num_ranks, num_ranks, use_fp8=False)
    return buffer.low_latency_combine(rows, idx, weights, handle)[0]


def low_latency_beside(group: Any, enable_shrink: bool) -> None:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(3, 128, 3, 3, enable_shrink=enable_shrink)
    with Buffer(
        group, 1 << 20, num_bytes, True, device="cpu", enable_shrink=enable_shrink, timeout_s=20.0
    ) as buffer:
        assert torch.equal(low_latency_pair(buffer), torch.ones(3, 128).bfloat16())
        group.all_gather_object(None)
        if buffer.rank != 1:
            buffer.reset(without=[1])
            expected = torch.ones(3, 128).bfloat16()
            expected[1] = 0
            for _ in range(3):
                dispatch_some(buffer)
                if not enable_shrink:
                    with pytest.raises(UnsupportedError, match="enable_shrink"):
                        low_latency_pair(buffer)
                    continue
                assert torch.equal(low_latency_pair(buffer), expected)
                mask = torch.zeros(3, dtype=torch.int32)
                buffer.low_latency_query_mask_buffer(mask)
                assert mask.tolist() == [0, 1, 0]
                with pytest.raises(UnsupportedError, match="reset"):
                    buffer.low_latency_clean_mask_buffer()
                with pytest.raises(UnsupportedError, match="rank 1 is absent"):
                    buffer.low_latency_update_mask_buffer(1, False)
        group.all_gather_object(None)
        if buffer.rank == 1:
            with pytest.raises(MaskedOut):
                low_latency_pair(buffer)
        buffer.reset()
        assert torch.equal(low_latency_pair(buffer), torch.ones(3, 128).bfloat16())


@pytest.mark.parametrize("enable_shrink", [True, False])
def test_low_latency_calls_go_by_the_same_ranks(enable_shrink: bool) -> None:
    local.run(lambda group: low_latency_beside(group, enable_shrink), 3, timeout_s=100)
    for seed in some_of(range(10)):
        simulate.run(lambda group: low_latency_beside(group, enable_shrink), 3, seed, timeout_s=60)


# ---- layers -------------------------------------------------------------------------------------


def layer_beside(group: Any) -> None:
    shape = dict(hidden=64, num_experts=7, num_topk=2, max_tokens=8, device="cpu")
    with ExpertParallel(group, **shape, mode="prefill") as layer:
        rank = layer.buffer.rank
        chance = torch.Generator().manual_seed(rank)
        x = torch.randn(5, 64, generator=chance).bfloat16()
        weights = torch.rand(5, 2, generator=chance)
        idx = torch.stack([torch.randperm(7, generator=chance)[:2] for _ in range(5)])
        live = without_absent(Case((0,) * 3, experts=7, absent=(0,)), idx)

        def forward(choices: torch.Tensor) -> torch.Tensor:
            return layer(x, choices, weights, lambda batch: batch.x * 2)

        before = forward(live)
        forward(idx)
        group.all_gather_object(None)
        if rank != 0:
            layer.reset(without=[0])
            assert not torch.equal(live, idx)
            assert torch.equal(forward(idx), before)
        group.all_gather_object(None)
        layer.reset()
        forward(idx)
    with (
        ExpertParallel(group, **shape) as layer,
        pytest.raises(UnsupportedError, match="prefill"),
    ):
        layer.reset(without=[(rank + 1) % 3])


def test_a_layer_that_prefills_goes_on() -> None:
    local.run(layer_beside, 3, timeout_s=100)


def test_plans_cover_what_they_should() -> None:
    plans = [plan_of(seed) for seed in range(NUM_SEEDS)]
    assert {plan.form for plan in plans} == set(FORMS)
    assert {len(plan.steps()) for plan in plans} == {1, 2}
    assert any(0 in plan.absent for plan in plans)
    assert any(len(plan.absent) == plan.num_ranks - 1 > 1 for plan in plans)
    assert any(plan.notices for plan in plans)
