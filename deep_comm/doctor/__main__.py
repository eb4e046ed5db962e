"""``python -m deep_comm.doctor``: always prints; the verdict at its end is the exit code."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from deep_comm.doctor.findings import Section, devices, environment, machine, modules, packages


def pings() -> Section:
    # Imported here, because it needs the native modules, whose absence is a finding and not a
    # crash.
    from deep_comm.doctor.ping import pings as run_pings

    return run_pings()


def checkup(name: str, examine: Callable[[], Section]) -> Section:
    """The section, or one that says why it could not be made."""
    try:
        return examine()
    except Exception as error:  # noqa: BLE001 - a doctor reports
        section = Section(name)
        section.lines.extend(traceback.format_exc().splitlines()[-3:])
        section.problems.append(f"{name}: {type(error).__name__}: {error}")
        return section


def main(arguments: Sequence[str] = ()) -> int:
    argparse.ArgumentParser(
        prog="python -m deep_comm.doctor",
        description="Print what this machine has, send a token back and forth over each transport, "
        "and end with a verdict, which is the exit code.",
    ).parse_args(arguments)
    problems: list[str] = []
    warnings: list[str] = []
    for examine in (machine, packages, modules, devices, environment, pings):
        section = checkup(examine.__name__, examine)
        print(f"== {section.title}")
        for line in section.lines:
            print(f"   {line}")
        sys.stdout.flush()
        problems += section.problems
        warnings += section.warnings
    for warning in warnings:
        print(f"note: {warning}")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print(f"verdict: {'OK' if not problems else f'{len(problems)} problem(s)'}")
    return 0 if not problems else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
