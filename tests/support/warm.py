"""A command that runs Python programs as `python` does, two seconds of imports sooner.

``warm.python()`` stands for ``sys.executable`` in commands of tests, ``warm.run`` for
``subprocess.run``. What they run is a fork of a process that has imported torch and deep_comm
(warm_server.py), and so are the ranks that the program starts, by torchrun or by multiprocessing.
Everything else is as a new process finds it, but that it leaves without taking the interpreter
apart. Tests of how processes start and end take ``sys.executable``.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

START_S = 120.0

# Without torch this starts in a fiftieth of the time.
LAUNCHER = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
own = server.fileno()
files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != own]
files = sorted(file for file in files if os.path.exists(f"/proc/self/fd/{{file}}"))
server.connect({path!r})
request = dict(arguments=sys.argv[1:], environment=dict(os.environ), folder=os.getcwd())
request["files"] = files
def pass_on(number, _):
    server.send(bytes([number]))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, pass_on)
text = json.dumps(request).encode() + b"\\n"
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
sent = server.sendmsg([text], rights)
server.sendall(text[sent:])
code = int.from_bytes(server.recv(4), "little", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def is_offered() -> bool:
    """Not beside CUDA devices, which a program could then only use if the server had never."""
    return not torch.cuda.is_available()


@functools.cache
def python() -> str:
    """The command; the server starts with the first call."""
    if not is_offered():
        return sys.executable
    folder = tempfile.mkdtemp(prefix="deep_comm.warm.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    socket, launcher = Path(folder, "socket"), Path(folder, "python")
    launcher.write_text(LAUNCHER.format(python=sys.executable, path=str(socket)))
    launcher.chmod(0o755)
    program = Path(__file__).with_name("warm_server.py")
    server = subprocess.Popen(
        [sys.executable, str(program), str(socket), str(launcher)], stdin=subprocess.PIPE, cwd="/"
    )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(START_S)

    atexit.register(end)
    deadline = time.monotonic() + START_S
    while not socket.exists():
        assert server.poll() is None, "the server of warm programs has ended"
        assert time.monotonic() < deadline, "the server of warm programs does not start"
        time.sleep(0.05)
    return str(launcher)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run of a command that begins with sys.executable."""
    assert command[0] == sys.executable
    return subprocess.run([python(), *command[1:]], **options)


def torchrun(num_ranks: int) -> list[str]:
    """The begin of a command that ``run`` takes: ``num_ranks`` ranks by torchrun, on this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [*launcher, "--standalone", "--nproc-per-node", str(num_ranks)]
