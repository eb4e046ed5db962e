"""Many cases on ranks that check what they got themselves: nothing is sent to the process that
asks, and all ranks check at a time.

Cases that want the same Buffer share one, so that most meet what others have left behind. Large
cases are made and checked on the rank's device (roundtrip.results_stay): the reference is plain
torch, and gives the same bits there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import expanded
import quantised
import roundtrip
import torch


@dataclass(frozen=True)
class Kind:
    """What is done with a case; all functions can be sent to a rank by name."""

    call_once: Callable[..., Any]  # (buffer, case, number of the call, options)
    verify: Callable[[Any, Sequence[Sequence[Any]]], None]  # (case, results by rank and call)


ROUNDTRIP = Kind(roundtrip.call_once, roundtrip.verify)
EXPANDED = Kind(expanded.call_once, expanded.verify)
QUANTISED = Kind(quantised.call_once, quantised.verify)  # cases come with their forms


def plain_case(case: Any) -> Any:
    return case[0] if isinstance(case, tuple) else case


def _buffer_wanted(case: Any) -> tuple[Any, ...]:
    """Equal for cases that can share a Buffer."""
    return tuple(plain_case(case).buffer_arguments().items())


def failures_of(
    group: Any, kind: Kind, cases: Sequence[Any], options: dict, device: torch.device | None = None
) -> list[str]:
    """On a rank: run all calls of all cases, and check what this rank got. What is wrong, by case.

    Args:
        options: stream arguments of the calls.
        device: default: the current CUDA device.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    sharing: dict[tuple[Any, ...], list[Any]] = {}
    for case in cases:
        sharing.setdefault(_buffer_wanted(case), []).append(case)
    failures = []
    for same in sharing.values():
        with roundtrip.buffer_of(group, plain_case(same[0]), device) as buffer:
            assert buffer.runtime is not None
            whole_sm = buffer.runtime.smem_bytes_limit
            for case in same:
                plain = plain_case(case)
                smem_bytes = whole_sm if plain.smem_bytes is None else plain.smem_bytes
                buffer.runtime.smem_bytes_limit = smem_bytes
                stays = roundtrip.results_stay() if plain.is_large else contextlib.nullcontext()
                with stays:
                    calls = [
                        kind.call_once(buffer, case, call, options) for call in range(plain.calls)
                    ]
                try:
                    with device if plain.is_large else contextlib.nullcontext():
                        kind.verify(case, _of_all_ranks(group.rank(), plain, calls))
                except AssertionError as error:
                    failures.append(f"{case}: {error}")
                del calls
    return failures


def _of_all_ranks(rank: int, case: Any, calls: list[Any]) -> list[list[Any]]:
    """Results of which only one rank's are here."""
    return [calls if number == rank else [None] * case.calls for number in range(case.num_ranks)]


def check(run: Callable[..., Any], kind: Kind, cases: Sequence[Any], **options: Any) -> None:
    """``cases``, all of the same number of ranks, on the ranks that ``run(fn, num_ranks, *args)``
    starts; ``options``: stream arguments of the calls.
    """
    num_ranks = plain_case(cases[0]).num_ranks
    by_rank = run(failures_of, num_ranks, kind, list(cases), options)
    failures = [failure for failures in by_rank for failure in failures]
    assert not failures, "\n".join(failures)
