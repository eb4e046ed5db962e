"""What a report of racecheck means for kernels that order shared memory by words of their own.

racecheck knows barriers, mbarriers and atomics. It does not know that a load that acquires sees
what came before the store that released: so it reports the words themselves, and all data that is
handed on through one. Both kinds are listed here, function by function; whether the order holds is
shown by the simulation, whose memory model knows it (csrc/simt/README.md). Everything else that is
reported is a finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FLAG_ACCESS = {"deep_comm::arch::ld_acquire_cta", "deep_comm::arch::st_release_cta"}

# Who writes data that somebody else reads behind such a word: the writers, the readers, the word.
HANDED_ON = [
    (
        {"deep_comm::TokenWatch::look_up", "deep_comm::TokenWatch::hand_on"},
        {"deep_comm::add_ready", "deep_comm::reduce_rows"},
        "CombineEntry::num_ready (csrc/device/intranode/combine_watch.cuh)",
    ),
]

_FIRST = re.compile(r"Race reported between (Read|Write) access at (.+?)\+0x[0-9a-f]+")
_SECOND = re.compile(r"and (Read|Write) access at (.+?)\+0x[0-9a-f]+ .*\[(\d+) hazards?\]")


@dataclass(frozen=True)
class Race:
    """Two accesses to shared memory that racecheck sees no order between."""

    first: str  # "Read" or "Write"
    first_function: str
    second: str
    second_function: str

    def ordered_by(self) -> str | None:
        """The word that orders them, if it is one of the known ones."""
        if {self.first_function, self.second_function} <= FLAG_ACCESS:
            return "itself: a word that is released and acquired"
        sides = {self.first: self.first_function, self.second: self.second_function}
        for writers, readers, word in HANDED_ON:
            if sides.get("Write") in writers and sides.get("Read") in readers:
                return word
        return None


def _function(text: str) -> str:
    """`void ns::f<(ns::Dtype)0>(int, T *)` is `ns::f`."""
    depth, name = 0, ""
    for char in text:
        depth += {"<": 1, ">": -1}.get(char, 0)
        if depth == 0 and char == "(":
            break
        if depth == 0 and char != ">":
            name += char
    return name.split()[-1]


def races_of(report: Iterable[str]) -> Counter[Race]:
    """Lines of `--racecheck-report analysis`: the races, and how many hazards each stands for."""
    found: Counter[Race] = Counter()
    first: tuple[str, str] | None = None
    for line in report:
        if match := _FIRST.search(line):
            first = (match[1], _function(match[2]))
        elif (match := _SECOND.search(line)) and first is not None:
            found[Race(*first, match[1], _function(match[2]))] += int(match[3])
    return found


def verdict(report: list[str]) -> str:
    """ "OK, …" if every reported race has a known order; else what is wrong, a race a line."""
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", "\n".join(report))
    if summary is None:
        return "no summary: it did not run to its end"
    races = races_of(report)
    if int(summary[1]) != sum(1 for line in report if _FIRST.search(line)):
        return "a report of another form, which was not understood"
    if unordered := [race for race in races if race.ordered_by() is None]:
        return "\n".join(["findings", *(f"    {race}" for race in unordered)])
    words = sorted({str(race.ordered_by()) for race in races})
    return "\n".join(["OK" + (", but for accesses ordered by" if words else ""), *words])
