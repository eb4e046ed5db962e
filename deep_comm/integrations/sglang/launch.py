"""python -m deep_comm.integrations.sglang.launch …: sglang.launch_server with
the dispatcher exchanged.

SGLang starts its workers with the spawn method, which imports the main module again in each of
them: what stands at the top level here runs in all processes of the server.
"""

from __future__ import annotations

import runpy
import sys

from deep_comm.errors import UnsupportedError
from deep_comm.integrations.sglang.plugin import register

if __name__ in ("__main__", "__mp_main__"):
    try:
        register()
    except UnsupportedError as error:
        sys.exit(f"deep_comm.integrations.sglang.launch: {error}")

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
