"""``deep_comm doctor``: always prints; the verdict at its end is the exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict

import deep_comm
from deep_comm.doctor.findings import Section, devices, environment, machine, modules, packages
from deep_comm.settings import command_line


def pings() -> Section:
    # Imported here: what it needs may be missing, which is a finding.
    from deep_comm.doctor.ping import pings as run_pings

    return run_pings()


def checkup(name: str, examine: Callable[[], Section]) -> Section:
    """The section, or one that says why it could not be made."""
    try:
        return examine()
    except ImportError as error:
        told = deep_comm.explained(error)
        if told is error:
            return _crashed(name, error)
        return Section(name, [f"left out: {told}"], [str(told)])
    except Exception as error:  # noqa: BLE001 - a doctor reports
        return _crashed(name, error)


def _crashed(name: str, error: Exception) -> Section:
    lines = traceback.format_exc().splitlines()[-3:]
    return Section(name, lines, [f"{name}: {type(error).__name__}: {error}"])


def main(arguments: Sequence[str] = ()) -> int:
    parser = command_line.parser(
        "doctor",
        "Print what this machine has, send a token back and forth over each transport, and end "
        "with a verdict, which is the exit code. Works without torch and before a build.",
        "deep_comm doctor",
        "deep_comm doctor --json | python -m json.tool",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json = parser.parse_args(arguments).json
    sections: list[Section] = []
    progress = command_line.Progress()
    for examine in (machine, packages, modules, devices, environment, pings):
        progress.step(examine.__name__)
        if examine is pings and sections[-1].problems:  # of which every Buffer would tell again
            section = Section("pings", ["left out: mend the environment variables first"])
        else:
            section = checkup(examine.__name__, examine)
        sections.append(section)
        if not as_json:
            print("\n".join([f"== {section.title}", *(f"   {line}" for line in section.lines)]))
            sys.stdout.flush()
    warnings = [text for section in sections for text in section.warnings]
    # What is missing is missing to several parts.
    problems = list(dict.fromkeys(text for section in sections for text in section.problems))
    verdict = "OK" if not problems else f"{len(problems)} problem(s)"
    if as_json:
        found = {"verdict": verdict, "problems": problems, "warnings": warnings}
        print(json.dumps({**found, "sections": [asdict(it) for it in sections]}, indent=2))
        return 0 if not problems else 1
    for warning in warnings:
        print(f"note: {warning}")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print(f"verdict: {verdict}")
    return 0 if not problems else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
