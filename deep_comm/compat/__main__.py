"""python -m deep_comm.compat install | uninstall | path | status"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deep_comm.compat import installer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.compat",
        description="Make `import deep_ep` the drop-in of deep_comm, or take it back.",
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
    options = parser.parse_args(arguments)
    try:
        if options.command == "path":
            print(installer.SITE)
        elif options.command == "install":
            print(f"installed {installer.install(options.target)}")
        elif options.command == "uninstall":
            print(f"removed {installer.uninstall(options.target)}")
        else:
            print(installer.describe(options.target))
    except (installer.InstallError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
