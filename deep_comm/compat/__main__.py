"""``deep_comm compat install | uninstall | path | status``"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deep_comm.compat import installer
from deep_comm.settings import command_line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "compat",
        "Make `import deep_ep` the drop-in of deep_comm, or take it back.",
        "deep_comm compat install",
        "deep_comm compat status --json",
        "PYTHONPATH=$(deep_comm compat path) python program.py",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "install": "install the package deep_ep beside deep_comm",
        "uninstall": "remove it again",
        "path": "print a folder that holds it, for PYTHONPATH; installs nothing",
        "status": "say what `import deep_ep` finds",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        if name != "path":
            command.add_argument("--target", type=Path, help="folder instead of site-packages")
        if name == "status":
            command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        if options.command == "path":
            print(installer.SITE)
        elif options.command == "install":
            print(f"installed {installer.install(options.target)}")
        elif options.command == "uninstall":
            print(f"removed {installer.uninstall(options.target)}")
        elif options.json:
            print(json.dumps(installer.status(options.target), indent=2))
        else:
            print(installer.describe(options.target))
    except (installer.InstallError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
