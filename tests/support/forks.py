"""Starts servers by forking a process that has done their imports, which saves half a second of CPU time per server.

A fork has its own memory, descriptors and signals, and ends on its own. Tests of the start of `python -m
histospec.server` use `children.histospec`, as do servers on other hosts and servers with variables that imports may
read.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tests.support.fork_parent import EXIT
from tests.support.waiting import SECONDS

PROGRAM = Path(__file__).with_name("fork_parent.py")
UNREAD = ("HISTOSPEC_", "NUMBA_", "OMP_", "PYTEST_", "TORCH", "VLLM_")
"""Variables that nothing reads while the command is imported. Torch and the examples set some in the tests' process."""


def _read(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(UNREAD)}


ENVIRONMENT = _read(os.environ)
"""Of the parent: what the tests were started with."""


class Fork:
    """A forked process, with as much of subprocess.Popen as servers need. stderr: what it writes there."""

    def __init__(self, pid: int, stderr: int, told: int) -> None:
        self.pid = pid
        self.stderr: TextIO = os.fdopen(stderr)
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        """Its exit code, -N where signal N ended it; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float) -> int:
        """Its exit code, as `poll`. Raises TimeoutExpired when it runs on for so many seconds."""
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """As Popen does: nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            (self.returncode,) = EXIT.unpack(os.read(self._told, EXIT.size))
            os.close(self._told)
        return self.returncode


class _Parent:
    """The process that has imported the command; one for all servers of a test process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, PROGRAM, str(theirs.fileno())], cwd="/", env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        atexit.register(self._end)

    def fork(self, words: Sequence[str], folder: Path, environment: dict[str, str], ignoring: Sequence[int]) -> Fork:
        own = {name: value for name, value in environment.items() if name not in ENVIRONMENT}
        request = {"words": words, "folder": str(folder), "environment": own, "ignoring": ignoring}
        (stderr, its_stderr), (told, its_told) = os.pipe(), os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._requests, [json.dumps(request).encode()], [its_stderr, its_told])
        finally:
            os.close(its_stderr)
            os.close(its_told)
        if not select.select([told], [], [], SECONDS)[0] or not (pid := os.read(told, EXIT.size)):
            raise RuntimeError(f"no server was forked; its parent ended with {self._process.poll()}")
        return Fork(EXIT.unpack(pid)[0], stderr, told)

    def _end(self) -> None:
        self._requests.close()
        self._process.wait(SECONDS)


_parent: _Parent | None = None
_starting = threading.Lock()


def new(
    words: Sequence[str], folder: Path, environment: dict[str, str], ignoring: Sequence[signal.Signals | int]
) -> Fork | None:
    """Runs `histospec` with these words in a fork; None if a variable differs that the imports may have read."""
    global _parent
    if _read(environment) != ENVIRONMENT:
        return None
    with _starting:
        if _parent is None:
            _parent = _Parent()
    return _parent.fork(words, folder, environment, [int(number) for number in ignoring])
