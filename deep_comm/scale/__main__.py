"""``python -m deep_comm.scale``: one table of docs/scale.md, or the times of one job.

    python -m deep_comm.scale compare
    python -m deep_comm.scale job --ranks 128 --routing zipf --sms 48 --nic 100
    python -m deep_comm.scale update docs/scale.md

What is counted, and what is left out: docs/scale.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence

import torch

from deep_comm import _core
from deep_comm.scale import low_latency, tables
from deep_comm.scale.machine import MACHINES
from deep_comm.scale.routing import ROUTINGS, Job
from deep_comm.settings.command_line import Parser, above_zero, at_least, file_to_read

# A table stands between the command that makes it and the next empty line.
_TABLE = re.compile(r"(<!-- python -m deep_comm\.scale (\w+) -->\n)(?:\|[^\n]*\n)*")


def updated(page: str) -> str:
    """A page with all of its tables made anew. Raises ValueError."""
    for name in {match[2] for match in _TABLE.finditer(page)} - set(tables.TABLES):
        raise ValueError(f"page: there is no table {name}; there are {', '.join(tables.TABLES)}")
    return _TABLE.sub(lambda match: match[1] + tables.TABLES[match[2]]() + "\n", page)


def _parser() -> Parser:
    parser = Parser(prog="python -m deep_comm.scale", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in tables.TABLES:
        commands.add_parser(name, help="a table of docs/scale.md")
    update = commands.add_parser("update", help="rewrite all tables of a page")
    update.add_argument("page", type=file_to_read)
    job = commands.add_parser("job", help="one job: normal mode, and low latency in three ways")
    add = job.add_argument
    add("--ranks", type=at_least(1), default=64)
    add("--ranks-per-node", type=at_least(1), default=8)
    add("--tokens", type=at_least(1), default=4096, help="tokens per rank")
    add("--hidden", type=at_least(16, multiple=16), default=7168)
    add("--experts", type=at_least(1), help="default: 256, or one per rank")
    add("--topk", type=at_least(1), default=8)
    add("--dtype", choices=("fp8", "bf16"), default="fp8", help="rows of dispatch; combine is bf16")
    add("--routing", choices=tuple(ROUTINGS), default="limited")
    add("--seed", type=at_least(0, 10**13), default=0)
    add("--sms", type=at_least(1, _core.max_channels), default=tables.NUM_SMS)
    add("--machine", choices=tuple(MACHINES), default="h200")
    add("--nic", type=above_zero, help="GB/s of a GPU's NIC, instead of the machine's")
    add("--nvlink", type=above_zero, help="GB/s of a GPU's NVLink, instead of the machine's")
    return parser


def _job(parsed: argparse.Namespace) -> str:
    machine = MACHINES[parsed.machine]
    rates = {"nic_gb_per_s": parsed.nic, "nvlink_gb_per_s": parsed.nvlink}
    machine = dataclasses.replace(
        machine, **{name: rate for name, rate in rates.items() if rate is not None}
    )
    job = Job(
        parsed.ranks,
        parsed.tokens,
        parsed.hidden,
        parsed.experts or max(256, parsed.ranks),
        parsed.topk,
        parsed.dtype,
        parsed.routing,
        parsed.ranks_per_node,
        parsed.seed,
    )
    rows = []
    for name, times in zip(
        ("dispatch", "combine"), tables.normal_times(job, parsed.sms, machine), strict=True
    ):
        alone = (times.nic_us, times.nvlink_us, times.sm_us)
        rows.append([name, f"{times.total_us:.0f}", *(f"{each:.0f}" for each in alone)])
    text = tables.markdown(["normal mode", "µs", "NIC alone", "NVLink alone", "SMs alone"], rows)
    traffic = tables.traffic_of(job, max(1, parsed.sms // 2))
    rows = []
    for way in low_latency.WAYS:
        sent, back = (
            operation(job, traffic, machine, way)
            for operation in (low_latency.dispatch, low_latency.combine)
        )
        rows.append([f"a row a (token, {way})", f"{sent.us:.0f}", f"{back.us:.0f}"])
    return text + "\n\n" + tables.markdown(["low latency", "dispatch µs", "combine µs"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if parsed.command == "job":
            print(_job(parsed))
        elif parsed.command == "update":
            parsed.page.write_text(updated(parsed.page.read_text()))
        else:
            print(tables.TABLES[parsed.command]())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
