"""Reports of racecheck are read, sorted and judged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from lib import races

FLAGS = """\
========= Error: Race reported between Read access at T1 deep_comm::arch::ld_acquire_cta<unsigned int>(const T1 *)+0x88f0 in cuda.cuh:160
=========     and Write access at void deep_comm::arch::st_release_cta<unsigned int>(T1 *, std::type_identity<T1>::type)+0x8750 in cuda.cuh:165 [28 hazards]
=========     and Write access at void deep_comm::arch::st_release_cta<unsigned int>(T1 *, std::type_identity<T1>::type)+0x87c0 in cuda.cuh:165 [4 hazards]
"""  # noqa: E501
WINDOW = """\
========= Error: Race reported between Write access at deep_comm::TokenWatch::look_up(int)+0x6330 in combine_watch.cuh:247
=========     and Read access at void deep_comm::reduce_rows<(deep_comm::Dtype)0>(unsigned char *, const unsigned char *const *, int, int, int, int)+0xaa60 in reduce.cuh:113 [264 hazards]
=========     and Read access at void deep_comm::add_ready<(deep_comm::Dtype)2>(const deep_comm::Context &, const deep_comm::CombineArgs &, deep_comm::CombineEntry *, int)+0xb130 in combine_watch.cuh:324 [42 hazards]
"""  # noqa: E501
# The reader of the window has become its writer.
BACKWARDS = WINDOW.replace("Write", "X").replace("Read", "Write").replace("X", "Read")
PLAIN = WINDOW.replace("TokenWatch::look_up", "StagePipe::fill")


def report(*races_reported: str) -> list[str]:
    count = len(races_reported)
    summary = f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"
    return ["same bits", *"".join(races_reported).splitlines(), summary]


def test_functions_and_hazards_are_counted() -> None:
    found = races.races_of(report(FLAGS, WINDOW))
    assert {(race.first_function, race.second_function): num for race, num in found.items()} == {
        ("deep_comm::arch::ld_acquire_cta", "deep_comm::arch::st_release_cta"): 32,
        ("deep_comm::TokenWatch::look_up", "deep_comm::reduce_rows"): 264,
        ("deep_comm::TokenWatch::look_up", "deep_comm::add_ready"): 42,
    }


def test_words_that_order_are_named() -> None:
    assert races.verdict(report(FLAGS, WINDOW)).startswith("OK, but for accesses ordered by\n")
    assert "CombineEntry::num_ready" in races.verdict(report(WINDOW))
    assert races.verdict(report()) == "OK"


@pytest.mark.parametrize("race", [PLAIN, BACKWARDS])
def test_what_no_word_orders_is_a_finding(race: str) -> None:
    verdict = races.verdict(report(FLAGS, race))
    assert verdict.startswith("findings\n") and "reduce_rows" in verdict


def test_a_report_that_is_cut_or_new_is_not_taken_for_good() -> None:
    assert "did not run to its end" in races.verdict(report(FLAGS)[:-1])
    assert "not understood" in races.verdict(report(FLAGS.replace("Race reported", "A race")))
