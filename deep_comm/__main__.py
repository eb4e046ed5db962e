"""The command ``deep_comm NAME ...``, the same as ``python -m deep_comm.NAME ...``."""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from collections.abc import Sequence

import deep_comm

COMMANDS = {
    "doctor": "what this machine has, and whether deep_comm works on it",
    "bench": "dispatch and combine, checked bit by bit, then timed",
    "tune": "find the fastest Configs of this machine, and let Buffers use them",
    "trace": "one Chrome trace and a summary of what Buffers recorded",
    "simulate": "replay dispatch and combine under a seeded scheduler",
    "demo": "send a text through a Mixture-of-Experts layer over several ranks",
    "compat": "install deep_ep, the drop-in for DeepEP's programs, or remove it",
    "examples": "list the worked examples, or run one",
}


def usage() -> str:
    lines = ["usage: deep_comm COMMAND [arguments]", "", "commands:"]
    lines += [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    lines += [
        "",
        "`deep_comm COMMAND --help` says what it takes; `deep_comm --version` the version.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, rest = given[0], given[1:]
    if name == "--version":
        print(f"deep_comm {deep_comm.__version__}")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        print(f"deep_comm: no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(f"deep_comm.{name}.__main__").main(rest)
        return code
    except ImportError as error:
        if (told := deep_comm.explained(error)) is error and error.name != "torch":
            raise
        print(f"deep_comm {name}: {told}", file=sys.stderr)
        return 1
    except Exception as error:
        from deep_comm.errors import DeepCommError

        is_wanted = logging.getLogger("deep_comm").isEnabledFor(logging.DEBUG)
        if is_wanted or not isinstance(error, DeepCommError):
            raise
        print(f"deep_comm {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
