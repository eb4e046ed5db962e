"""Calls of normal mode that go on without ranks, as Buffer.reset(without=...) lets them, against
the reference of the same calls in which the absent ranks have no tokens and nobody selects their
experts, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import expanded
import graph_bodies
import pytest
import quantised
import roundtrip
import torch
from cases import ROUTINGS, Case, Scales, without_absent

import deep_comm
from deep_comm import Buffer, HandleMismatch, MaskedOut, PeerTimeout, errors, processes, simulate

FORMS = ("plain", "expanded", "fp8", "fp8_expanded")


@dataclass(frozen=True)
class Plan:
    """What ranks go through.

    Attributes:
        case: of calls while ranks are absent; those bring nothing.
        absent: the ranks that end.
        first: those of them that a reset of its own masks first, before more end.
        form: of the calls.
        notices: the others find out by a call that fails.
    """

    case: Case
    absent: tuple[int, ...]
    first: tuple[int, ...] = ()
    form: str = "plain"
    notices: bool = True

    @property
    def num_ranks(self) -> int:
        return self.case.num_ranks

    def steps(self) -> list[tuple[int, ...]]:
        """The ranks that are absent after each reset."""
        return [self.first, self.absent] if self.first else [self.absent]

    def case_with(self, absent: Sequence[int], step: int) -> Case:
        """Of calls with these ranks absent: a routing and payload of its own."""
        tokens = [0 if rank in absent else num for rank, num in enumerate(self.case.tokens)]
        seed = self.case.seed * 8 + step
        return dataclasses.replace(self.case, tokens=tuple(tokens), seed=seed)


def form_of(name: str) -> quantised.Form:
    return quantised.Form(expand=name == "fp8_expanded", column_major=name == "fp8_expanded")


def call_form(buffer: Buffer, case: Case, form: str) -> list:
    """All calls of a case."""
    if form == "plain":
        one = lambda call: roundtrip.call_once(buffer, case, call)
    elif form == "expanded":
        one = lambda call: expanded.call_once(buffer, case, call)
    else:
        one = lambda call: quantised.call_once(buffer, quantised.Formed(case, form_of(form)), call)
    return [one(call) for call in range(case.calls)]


def verify_form(case: Case, form: str, absent: Sequence[int], results: Sequence[Any]) -> None:
    """``results[rank][call]``; of absent ranks anything."""
    checked = dataclasses.replace(case, absent=tuple(absent))
    given = [[None] * case.calls if rank in absent else got for rank, got in enumerate(results)]
    if form == "plain":
        roundtrip.verify(checked, given)
    elif form == "expanded":
        expanded.verify(checked, given)
    else:
        quantised.verify(quantised.Formed(checked, form_of(form)), given)


def open_buffer(group: Any, case: Case, timeout_s: float, **options: Any) -> Buffer:
    buffer = Buffer(
        group, case.nvl_bytes, num_direct_bytes=case.direct_bytes, timeout_s=timeout_s, **options
    )
    if case.smem_bytes is not None:
        buffer.runtime.smem_bytes_limit = case.smem_bytes
    return buffer


def run_plan(buffer: Buffer, plan: Plan, die: Callable[[], None]) -> list[list]:
    """Calls of all ranks, then without those that `die`, which raises or never returns: what came
    of the calls after each reset, those of all ranks first."""
    results = [call_form(buffer, plan.case_with((), 0), plan.form)]
    gone: tuple[int, ...] = ()
    for step, absent in enumerate(plan.steps(), 1):
        ending = [rank for rank in absent if rank not in gone]
        if buffer.rank in ending:
            die()
        if plan.notices:
            notice(buffer, ending)
        buffer.reset(without=ending if step % 2 == 0 else absent)
        gone = absent
        results.append(call_form(buffer, plan.case_with(absent, step), plan.form))
    return results


def notice(buffer: Buffer, silent: Sequence[int]) -> None:
    """Ranks that call find out that somebody is silent, or that somebody else has given up."""
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=buffer.device)
    idx = torch.arange(3, device=buffer.device).view(3, 1) % buffer.group_size
    with pytest.raises(PeerTimeout):
        buffer.dispatch(x, topk_idx=idx, num_experts=buffer.group_size)
        buffer.check()


def refuse_tensors(buffer: Buffer, six: tuple[torch.Tensor, ...], gone: int) -> None:
    """Of a handle of ``dispatch_some`` from before a reset without that rank."""
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=buffer.device)
    rows = x[:1].expand(len(six[3]), -1).contiguous()
    for call in (lambda: buffer.combine(rows, six), lambda: buffer.dispatch(x, handle=six)):
        with pytest.raises(HandleMismatch, match=f"rows of rank {gone}"):
            call()


def verify_plan(plan: Plan, results: Sequence[Any]) -> None:
    """``results[rank]``: of run_plan; of ranks that ended anything."""
    for step, absent in enumerate(plan.steps(), 1):
        # Those that end later have told nobody what they got meanwhile.
        if absent == plan.absent:
            stepped = [None if rank in absent else got[step] for rank, got in enumerate(results)]
            verify_form(plan.case_with(absent, step), plan.form, absent, stepped)


# ---- simulated ----------------------------------------------------------------------------------


class Gone(Exception):
    """The rank ends here."""


def plan_of(seed: int, form: str | None = None) -> Plan:
    choose = random.Random(seed)
    num_ranks = choose.choice((2, 2, 3, 3, 4, 5))
    slots = choose.choice((1, 2, 3, 5))
    form = choose.choice(FORMS) if form is None else form
    is_cast, is_expanded = form.startswith("fp8"), form.endswith("expanded")
    case = Case(
        tuple(choose.choice((0, 1, 3, 6, 9)) for _ in range(num_ranks)),
        hidden=128 if is_cast else choose.choice((16, 32, 48)),
        experts=choose.choice((num_ranks, 5, 8, 11)),
        topk=choose.choice((1, 2, 4)),
        dtype=choose.choice((torch.bfloat16, torch.uint8)),
        scales=None if is_cast else choose.choice((None, None, Scales(3, torch.float32, "column"))),
        routing=choose.choice(ROUTINGS),
        num_sms=choose.choice((1, 1, 2)),
        send_chunk=choose.randint(1, slots),
        slots=slots,
        alignment=choose.choice((1, 2, 16)) if is_expanded else 1,
        worst=choose.choice((0, 0, 2)),
        biases=choose.choice((0, 1)),
        fused_layout=choose.choice((False, True)),
        calls=choose.choice((1, 2)),
        nvl_bytes=1 << 20 if form != "plain" else 1 << 18,
        direct_bytes=choose.choice((0, 1 << 13, 1 << 19, 1 << 19) if form != "plain" else
                                   (0, 1 << 12, 1 << 17, 1 << 17)),
        smem_bytes=None if is_cast else choose.choice((None, 11000)),
        seed=seed,
    )  # fmt: skip
    ranks = list(range(num_ranks))
    choose.shuffle(ranks)
    absent = ranks[: choose.randint(1, num_ranks - 1)]
    first = absent[: choose.randint(1, len(absent) - 1)] if len(absent) > 1 else []
    if choose.random() < 0.5:
        first = []
    return Plan(
        case, tuple(sorted(absent)), tuple(sorted(first)), form, notices=choose.random() < 0.3
    )


def simulate_plan(plan: Plan, seed: int, faults: tuple[str, ...] = ()) -> None:
    def die() -> None:
        raise Gone

    def main(group: simulate.SimulatedGroup) -> Any:
        buffer = open_buffer(group, plan.case, 1000.0, device="cpu")
        try:
            return run_plan(buffer, plan, die)
        except (Gone, MaskedOut):
            # The others may have gone on while this rank still waited for their last rows.
            assert buffer.rank in plan.absent
            return None

    results = simulate.run(
        main, plan.num_ranks, seed, on_stuck="clock", timeout_s=120, faults=faults
    )
    verify_plan(plan, results)


def notices_fault(plan: Plan, seed: int, faults: tuple[str, ...]) -> str | None:
    try:
        simulate_plan(plan, seed, faults)
    except (AssertionError, errors.DeepCommError, simulate.MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---- processes ----------------------------------------------------------------------------------


def require_survivors(plan: Plan, ended: Sequence[processes.Outcome]) -> None:
    for outcome in ended:
        if outcome.rank not in plan.absent:
            assert outcome.error is None, f"{outcome.error}\n{outcome.traceback}"


def survive(group: Any, plan: Plan, timeout_s: float, on_gpu: bool) -> list[list[list]]:
    """Of a process, with two Buffers, one that uses rings and one whose rows go to their final
    places: ranks are killed, the others make calls of every form, on GPUs then captured ones.
    Results by Buffer and form."""
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def die() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        os._exit(0)

    results = []
    cases = [dataclasses.replace(plan.case, direct_bytes=size) for size in DIRECT_BYTES]
    buffers = [open_buffer(group, case, timeout_s, device=device) for case in cases]
    for buffer, case in zip(buffers, cases, strict=True):
        call_form(buffer, case, plan.form)
    olds = [tuple(dispatch_some(buffer)[4]) for buffer in buffers]
    if on_gpu:
        torch.cuda.synchronize()
    group_barrier(group)  # nobody is in the middle of these
    for step, absent in enumerate(plan.steps(), 1):
        ending = [rank for rank in absent if rank not in plan.first or step == 1]
        if buffers[0].rank in ending:
            die()
        for buffer in buffers:
            notice(buffer, ending)
            buffer.reset(without=absent)
    for buffer, old in zip(buffers, olds, strict=True):
        refuse_tensors(buffer, old, min(plan.absent))
        rows, *_, handle, _ = dispatch_some(buffer)
        assert torch.equal(*(buffer.combine(rows, each)[0] for each in (handle, tuple(handle))))
    for buffer, case in zip(buffers, cases, strict=True):
        alone = dataclasses.replace(plan, case=case).case_with(plan.absent, 1)
        results.append([call_form(buffer, alone, form) for form in FORMS])
    if on_gpu:
        check_graph(buffers[-1], plan.absent)
    for buffer in buffers:
        buffer.destroy()
    return results


DIRECT_BYTES = (0, 4 << 20)


def group_barrier(group: Any) -> None:
    from deep_comm.ranks.rendezvous import Rendezvous

    Rendezvous(group).barrier()


def verify_survivors(plan: Plan, ended: Sequence[processes.Outcome]) -> None:
    require_survivors(plan, ended)
    for index, direct_bytes in enumerate(DIRECT_BYTES):
        case = dataclasses.replace(plan.case, direct_bytes=direct_bytes)
        alone = dataclasses.replace(plan, case=case).case_with(plan.absent, 1)
        for form, name in enumerate(FORMS):
            results = [None if outcome.rank in plan.absent else outcome.value[index][form]
                       for outcome in ended]  # fmt: skip
            verify_form(alone, name, plan.absent, results)


def check_graph(buffer: Buffer, absent: Sequence[int]) -> None:
    """Calls captured since the reset."""
    step = graph_bodies.make_step(buffer.device)
    graph_bodies.fill(step, buffer.rank, 0)
    graph_bodies.run_step(buffer, step)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        graph_bodies.run_step(buffer, step)
    routing = Case((0,) * buffer.group_size, experts=graph_bodies.EXPERTS, absent=tuple(absent))
    for call in range(1, 5):
        graph_bodies.fill(step, buffer.rank, call)
        graph.replay()
        buffer.check()
        combined = step.combined
        torch.cuda.synchronize()
        assert combined is not None
        live = dataclasses.replace(step, idx=without_absent(routing, step.idx))
        assert torch.equal(combined, graph_bodies.expected(live, buffer.group_size)), call


def dispatch_some(buffer: deep_comm.Buffer) -> Any:
    """A token to each expert, one of each rank."""
    num_ranks = buffer.group_size
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=buffer.device)
    idx = torch.arange(4, device=buffer.device).view(4, 1) % num_ranks
    return buffer.dispatch(x, topk_idx=idx, num_experts=num_ranks)
