"""checked_runs.py, which runs the cases of tests/gpu, on the host target: what is wrong is
found and said, and checks made in results_stay are those of the host.
"""

import dataclasses
from typing import Any

import checked_runs
import pytest
import roundtrip
import torch
from cases import Case, InternodeCase
from checked_runs import EXPANDED, QUANTISED, ROUNDTRIP, Kind, check
from quantised import FORMS

from deep_comm import local

HOST = torch.device("cpu")
SMALL = Case((5, 3), hidden=128, experts=4, topk=2, calls=2, biases=1, seed=3)
LARGE = dataclasses.replace(SMALL, tokens=(96, 160), hidden=32768, calls=1, nvl_bytes=64 << 20)
TWO_TIERS = InternodeCase((4, 7), hidden=128, experts=4, topk=2, ranks_per_node=1, num_sms=2)


def run(fn: Any, num_ranks: int, *arguments: Any) -> list[Any]:
    return local.run(lambda group: fn(group, *arguments, HOST), num_ranks, timeout_s=120)


@pytest.mark.parametrize(
    "kind, cases",
    [
        (ROUNDTRIP, [SMALL, LARGE, dataclasses.replace(SMALL, smem_bytes=40000, seed=4)]),
        (EXPANDED, [SMALL, dataclasses.replace(SMALL, alignment=16, seed=4)]),
        (QUANTISED, [(SMALL, form) for form in FORMS]),
        (ROUNDTRIP, [TWO_TIERS, dataclasses.replace(TWO_TIERS, calls=3, seed=1)]),
        (EXPANDED, [TWO_TIERS]),
        (QUANTISED, [(TWO_TIERS, FORMS[0])]),
    ],
)
def test_right_results_pass(kind: Kind, cases: list[Any], poison: None) -> None:
    check(run, kind, cases)


def _with_a_wrong_row(buffer: Any, case: Case, call: int, options: dict) -> Any:
    received = ROUNDTRIP.call_once(buffer, case, call, options)
    if buffer.rank == 1 and call == case.calls - 1:
        received.combined_x.view(torch.uint8)[2, 7] ^= 1
    return received


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
def test_one_wrong_bit_of_one_rank_is_found(case: Case) -> None:
    assert LARGE.is_large and not SMALL.is_large
    wrong = Kind(_with_a_wrong_row, ROUNDTRIP.verify)
    with pytest.raises(AssertionError, match=f"rank 1 call {case.calls - 1}: combined_x"):
        check(run, wrong, [case])


def test_equal_buffers_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    buffer_of = roundtrip.buffer_of

    def counted(group: Any, case: Case, device: torch.device) -> Any:
        if group.rank() == 0:
            made.append(case)
        return buffer_of(group, case, device)

    monkeypatch.setattr(checked_runs.roundtrip, "buffer_of", counted)
    other = dataclasses.replace(SMALL, direct_bytes=1 << 20)
    check(run, ROUNDTRIP, [SMALL, other, dataclasses.replace(SMALL, seed=9), other])
    assert made == [SMALL, other]
