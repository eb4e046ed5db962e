"""``deep_comm tune``: measure dispatch and combine over SM counts, chunks and ring slots."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deep_comm.bench import __main__ as bench
from deep_comm.bench import options
from deep_comm.settings import command_line

GPU_SWEEPS = (
    ["--mode", "direct", "--sms", "sweep"],
    ["--mode", "ring", "--sms", "auto,8,16,24", "--send", "sweep", "--slots", "sweep"],
)
# The host target runs a fiber for every thread of every block: few blocks are what it is good at.
HOST_SWEEPS = (["--mode", "direct,ring", "--sms", "auto,2,4,8", "--slots", "16,64"],)
OPERATIONS = "dispatch,dispatch cached,combine"
FIXED = ["--execution", "eager", "--ops", OPERATIONS, "--no-rivals", "--simulation-runs", "0"]


def sweeps(passed_on: Sequence[str], *, stores: bool) -> list[list[str]]:
    """Arguments of each bench run: what was given replaces the same option of the sweep. Ends the
    process if one of them is refused."""
    chosen = options.parse(passed_on, name="tune")
    if chosen.family != "normal":
        command_line.refuse("tune", "--mode: must be direct, ring or both")
    for name in ("json", "plot", "from"):
        if vars(chosen).get(name) is not None:
            command_line.refuse("tune", f"--{name}: of deep_comm bench alone; give --out")
    if stores and (problem := options.store_problem(chosen.on_gpu)):
        command_line.refuse("tune", f"{problem}; or give --no-store")
    made = []
    for part in GPU_SWEEPS if chosen.on_gpu else HOST_SWEEPS:
        modes = ",".join(mode for mode in part[1].split(",") if mode in chosen.mode)
        if not modes:
            continue
        made.append([*FIXED, *part, *passed_on, "--mode", modes])
        run = options.parse(made[-1], name="tune")
        if run.sms == (None,):
            command_line.refuse("tune", "--sms: must name numbers to choose from")
        if not set(OPERATIONS.split(",")) & set(run.ops) or "eager" not in run.execution:
            command_line.refuse("tune", f"--ops: must name eager calls of {OPERATIONS}")
    return made


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[list[str]]]:
    """Its own options, and what sweeps() makes of those of bench."""
    parser = command_line.parser(
        "tune",
        "Measure dispatch and combine on this machine and choose, for every number of tokens, "
        "payload, mode and operation, the Config with the fewest SMs within 2 % of the best time. "
        "Times are microseconds. What is best for many tokens is stored for this machine and "
        "number of ranks, in DEEP_COMM_TUNE_FILE or deep_comm/tune.json of the cache folder: "
        "Buffers read it there for calls without a Config. All options of `deep_comm bench` may "
        "follow; by default direct mode over the SM sweep, ring mode over chunks and slots too. "
        "Buffers of the host target read only what DEEP_COMM_TUNE_FILE names.",
        "deep_comm tune",
        "deep_comm tune --no-store --tokens 1024,4096 --sms 8,24 --mode ring",
        "DEEP_COMM_TUNE_FILE=tuned.json deep_comm tune --device cpu",
    )
    add = parser.add_argument
    add("--out", type=command_line.file_to_write, default=Path("tune.json"),
        help="write the choices there, as JSON")  # fmt: skip
    add("--no-store", action="store_true", help="do not change the file that Buffers read")
    own, passed_on = parser.parse_known_args(arguments)
    return own, sweeps(passed_on, stores=not own.no_store)


def main(arguments: Sequence[str] | None = None) -> int:
    own, runs = parse(arguments)
    from deep_comm import tuning

    documents: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="deep_comm.") as folder,
        tuning.without_an_absent_file(),
    ):
        for number, run in enumerate(runs):
            file = Path(folder) / f"{number}.json"
            print(f"tune: part {number + 1} of {len(runs)}", flush=True)
            bench.main([*run, "--json", str(file)])
            if file.exists():
                documents.append(json.loads(file.read_text()))
    if not documents:  # one of torchrun's ranks that do not report
        return 0
    from deep_comm.tune import choices

    found = choices.choose([line for document in documents for line in document["normal"]])
    print(choices.describe(found))
    if not own.no_store:
        print(f"stored in {choices.store(found, documents[0])}")
    kept = {key: documents[0][key] for key in ("machine", "num_ranks", "date", "limit")}
    own.out.write_text(json.dumps({**kept, "choices": found}, indent=2) + "\n")
    print(f"# deep_comm tune OK: {len(found)} choices in {own.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
