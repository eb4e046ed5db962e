"""``deep_comm examples``: a list; ``deep_comm examples NAME ...`` runs one."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def index() -> dict[str, str]:
    """The first sentence of every example, which says what it shows. Imports none of them."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        found[file.stem] = " ".join(docstring.split()).partition(". ")[0].rstrip(".")
    return found


def usage() -> str:
    examples = index()
    width = max(map(len, examples))
    lines = ["usage: deep_comm examples NAME [arguments]", ""]
    lines += [f"  {name:<{width}}  {text}" for name, text in examples.items()]
    return "\n".join([
        *lines,
        "",
        "Each starts its own ranks and ends with a check of its own, which is the exit code:",
        "  deep_comm examples dispatch_combine --ranks 3",
        "Under torchrun every process is a rank:",
        "  torchrun --nproc-per-node 4 -m deep_comm.examples.dispatch_combine",
        "`deep_comm examples NAME --help` says what it takes.",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    if given[0] not in index():
        print(f"deep_comm examples: no example {given[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    example = importlib.import_module(f"deep_comm.examples.{given[0]}")
    code: int = example.main(given[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
