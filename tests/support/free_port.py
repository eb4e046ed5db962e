"""A port for a program that is told its number and binds it only seconds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20000


def free_port() -> int:
    """Not one of those that the kernel hands out: every connection of another test takes such a
    one, and could take this one in between."""
    first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    candidates = list(range(_LOWEST, first_ephemeral)) or [0]
    for _ in range(1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.choice(candidates)))
            except OSError:  # taken
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free port")
