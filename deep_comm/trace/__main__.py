"""``deep_comm trace``: what Buffers have recorded, merged over ranks.

Prints when the blocks passed each step of each kernel, and writes a Chrome trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from deep_comm.errors import DeepCommError
from deep_comm.settings import command_line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser(
        "trace",
        "Merge what Buffers with DEEP_COMM_TRACE left in DEEP_COMM_TRACE_DIR. Prints when the "
        "blocks passed each step of each kernel, in microseconds.",
        "deep_comm trace traces -o merged.json",
        "deep_comm trace traces/*.json --last 10 --json",
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="the files of all ranks, or their folder")
    add("-o", "--output", type=command_line.file_to_write,
        help="write a Chrome trace there, for ui.perfetto.dev")  # fmt: skip
    add("--last", type=command_line.at_least(1), metavar="CALLS",
        help="summarise only the last so many calls of each kernel")  # fmt: skip
    add("--json", action="store_true", help="print the times as JSON instead of a table")
    options = parser.parse_args(arguments)
    for file in options.files:
        if not file.exists():
            parser.error(f"{file} does not exist")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from deep_comm.trace import align, chrome_trace, load, summarise
    from deep_comm.trace.summary import step_times

    try:
        recordings = load(options.files)
        if not recordings:
            command_line.refuse("trace", "files: no recordings there")
        alignments, times = {}, {}
        for buffer, group in groupby(recordings, key=lambda recording: recording.buffer):
            of_buffer = list(group)
            alignments[buffer] = align(of_buffer)
            if options.json:
                found = step_times(of_buffer, alignments[buffer], options.last)
                times[buffer] = [asdict(each) for each in found]
            else:
                print(summarise(of_buffer, alignments[buffer], options.last))
        if options.json:
            print(json.dumps({"buffers": times}, indent=2))
        if options.output is not None:
            options.output.write_text(json.dumps(chrome_trace(recordings, alignments)))
            print(f"written: {options.output}", file=sys.stderr)
    except (DeepCommError, OSError) as error:
        command_line.refuse("trace", f"{error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
