"""A Python that has imported torch already, and forks for every program that it is asked to run.

    python warm_server.py SOCKET LAUNCHER

Started by warm.py, whose launcher is the client: it sends a program's arguments, environment,
folder and files, and gets its exit status. The server ends with its standard input.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

# With what they need.
PROGRAMS = (
    "torch.distributed.run", "deep_comm.bench.__main__", "deep_comm.demo.__main__",
    "deep_comm.doctor.__main__", "deep_comm.simulate.__main__",
)  # fmt: skip

MAX_REQUEST = 1 << 20


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """A request, and the files that came with it."""
    files = array.array("i")
    text = b""
    while not text.endswith(b"\n"):
        part, extras, _, _ = connection.recvmsg(MAX_REQUEST, socket.CMSG_LEN(256 * files.itemsize))
        if not part:
            raise EOFError
        for level, kind, content in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
        text += part
    return json.loads(text), list(files)


def become(request: dict, files: list[int], launcher: str) -> None:
    """In the child: what a new process would have found."""
    wanted = request["files"]
    # Two steps: a file may have come under a number that another one is to have.
    spare = max([*wanted, *files, 2]) + 1
    for place, file in enumerate(files):
        os.dup2(file, spare + place)
        os.close(file)
    for place, number in enumerate(wanted):
        os.dup2(spare + place, number, inheritable=True)
        os.close(spare + place)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # What the program starts is to start as quickly: ranks of torchrun, and of multiprocessing.
    os.environ["PYTHON_EXEC"] = launcher
    multiprocessing.set_executable(launcher)
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)


def run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    while arguments[0][:2] in ("-u", "-B", "-W", "-X"):  # -B, -W and -X are this process's own
        if arguments.pop(0) == "-u":
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)
    first = arguments[0]
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def code_of(arguments: list[str]) -> int:
    """Runs it to its end; its exit code."""
    try:
        run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(code: int) -> NoReturn:
    """As the interpreter does, but for taking itself apart: a second, after torch."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the program
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


class Server:
    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        self.children: dict[int, socket.socket] = {}
        self.woken, waker = socket.socketpair()
        for end in (self.woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the launchers pass it on
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.waker = waker

    def serve(self) -> tuple[dict, list[int]]:
        """Returns in every child, with its request; ends the server itself."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    self.end()
                elif key.fileobj is self.woken:
                    with contextlib.suppress(BlockingIOError):
                        self.woken.recv(4096)
                    self.reap()
                elif key.fileobj is self.listener:
                    child = self.accept()
                    if child is not None:
                        return child
                else:
                    self.pass_on(key.data)

    def accept(self) -> tuple[dict, list[int]] | None:
        connection, _ = self.listener.accept()
        try:
            request, files = receive(connection)
        except (EOFError, ValueError):
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.selector.close()
            for each in (
                self.listener,
                self.woken,
                self.waker,
                connection,
                *self.children.values(),
            ):
                each.close()
            os.setsid()
            return request, files
        for file in files:
            os.close(file)
        self.children[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def pass_on(self, pid: int) -> None:
        """A signal that the launcher got; or the launcher has been killed, and so is the child."""
        if pid not in self.children:
            return
        numbers = self.children[pid].recv(16)
        if not numbers:
            self.selector.unregister(self.children[pid])
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.children.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(
                    os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True)
                )
            connection.close()

    def end(self) -> NoReturn:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    path, launcher = sys.argv[1:]
    del sys.path[0]  # of this file
    for name in PROGRAMS:
        importlib.import_module(name)
        del sys.modules[name]  # runpy warns of programs that it finds imported
    gc.freeze()  # or every child's first collection copies all of it
    request, files = Server(path).serve()
    become(request, files, launcher)
    leave(code_of(request["arguments"]))


if __name__ == "__main__":
    main()
