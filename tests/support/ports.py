"""Ports for servers. No other process of the tests and no connection gets the same port."""

import fcntl
import functools
import os
import socket
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

FIRST, LAST = 10_240, 20_224
"""Below those that the system gives to connections, so that no connection takes one while its server is away."""
BUS = 10_000  # a node of a Redis Cluster listens so far above its port, too
BLOCK = 128  # ports that a process has for itself; it comes back to one only after all the others


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    return next(port for port in _mine() if _is_free(port) and _is_free(port + BUS))


@functools.cache
def _mine() -> Iterator[int]:
    """The ports of this process, again and again. The lock on them ends with it."""
    folder = Path(tempfile.gettempdir()) / "histospec-test-ports"
    folder.mkdir(exist_ok=True)
    for first in range(FIRST, LAST, BLOCK):
        descriptor = os.open(folder / str(first), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return cycle(range(first, first + BLOCK))
    raise RuntimeError(f"all ports from {FIRST} to {LAST} belong to other processes of tests")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
