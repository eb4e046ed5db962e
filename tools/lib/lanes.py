"""A pytest plugin: several pytest processes, the lanes of tools/test_gpus, take the files of one
list in turn, and write down at once how each test ended.

LANES_FOLDER holds what they share: `order.json`, names of files, the longest first; a file
`taken.<name>` for each that a lane has begun. LANE is this process's number: it writes
`lane<number>.jsonl`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ["LANES_FOLDER"])
LANE = int(os.environ["LANE"])


def write(**what: Any) -> None:
    """A line that stays when this process is killed."""
    with (FOLDER / f"lane{LANE}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def is_taken(name: str) -> bool:
    """Whether this process is the one to run a file; true for one process and once."""
    try:
        (FOLDER / f"taken.{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def in_order(files: dict[str, list[pytest.Item]]) -> Iterator[list[pytest.Item]]:
    order = json.loads((FOLDER / "order.json").read_text())
    for name in [*order, *sorted(set(files) - set(order))]:
        if name in files and is_taken(name):
            write(file=name)
            yield files[name]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):  # a whole file
        write(left_out=report.nodeid, why=report.longrepr[2].removeprefix("Skipped: "))


def pytest_collection_finish(session: pytest.Session) -> None:
    write(collected=[(item.path.name, item.nodeid) for item in session.items])


def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.testsfailed:  # a file that cannot be imported; pytest's own loop says so as well
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    files: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        files.setdefault(item.path.name, []).append(item)
    for items in in_order(files):
        for item, following in zip(items, [*items[1:], None], strict=True):
            write(begun=item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        why = report.longreprtext
    write(test=report.nodeid, when=report.when, outcome=report.outcome, s=report.duration, why=why)
