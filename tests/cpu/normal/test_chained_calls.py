"""Calls one after the other, without a wait between them: what tests/gpu runs over streams."""

from chained_calls import run_calls

from deep_comm import local


def test_calls_give_what_each_gives_alone() -> None:
    local.run(lambda group: run_calls(group, "cpu", 5), 3, timeout_s=60)
