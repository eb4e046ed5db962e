"""python -m deep_comm.trace: what Buffers have left, merged over ranks.

Prints when the blocks passed each step of each kernel, and writes a Chrome trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from deep_comm.errors import DeepCommError
from deep_comm.trace import align, chrome_trace, load, summarise


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.trace",
        description="Merge what Buffers with DEEP_COMM_TRACE left in DEEP_COMM_TRACE_DIR.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, help="the files of all ranks, or their folder"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="write a Chrome trace there, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--last", type=int, help="summarise only the last so many calls of each kernel"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        recordings = load(options.files)
        if not recordings:
            print("no recordings there", file=sys.stderr)
            return 1
        alignments = {}
        for buffer, group in groupby(recordings, key=lambda recording: recording.buffer):
            of_buffer = list(group)
            alignments[buffer] = align(of_buffer)
            print(summarise(of_buffer, alignments[buffer], options.last))
        if options.output is not None:
            options.output.write_text(json.dumps(chrome_trace(recordings, alignments)))
            print(f"written: {options.output}")
    except (DeepCommError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
