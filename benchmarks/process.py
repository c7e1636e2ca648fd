"""Processes of their own: what they hold is told from what the benchmark itself holds, and they can take turns."""

import ctypes
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

MIB = 1 << 20

Held = TypeVar("Held")
Result = TypeVar("Result")
Args = ParamSpec("Args")


class Child(Generic[Held]):
    """An object in a fresh process: `call(Kind.method, *args)` runs there, in its main thread, and gives the result."""

    def __init__(self, kind: Callable[Args, Held], *args: Args.args, **named: Args.kwargs) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, partial(kind, *args, **named)), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: Callable[Concatenate[Held, Args], object], *args: Args.args, **named: Args.kwargs) -> None:
        """Begins a call without waiting for it."""
        self._connection.send((method, args, named))

    def wait(self) -> None:
        """Waits for what was begun. Raises EOFError if the process died; its traceback is on stderr."""
        self._connection.recv()

    def ended(self, seconds: float) -> bool:
        """Whether what was begun has ended, or the process; waits so long for it."""
        return self._connection.poll(seconds)

    def call(self, method: Callable[Concatenate[Held, Args], Result], *args: Args.args, **named: Args.kwargs) -> Result:
        """Begins and waits. Raises EOFError as `wait` does."""
        self.start(method, *args, **named)
        result: Result = self._connection.recv()
        return result

    def end(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, make: Callable[[], object]) -> None:
    held = make()
    while True:
        try:
            method, args, named = connection.recv()
        except EOFError:
            return
        connection.send(method(held, *args, **named))


def printed(module: str, *args: str, environment: Mapping[str, str] | None = None) -> Any:
    """Runs `python -m module` with `args`, and `environment` on top of this one's. -> its last line, which is JSON.

    Raises subprocess.CalledProcessError if it fails.
    """
    command = [sys.executable, "-m", module, *args]
    told = os.environ | dict(environment or {})
    done = subprocess.run(command, env=told, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled() -> int:
    """The same, once the allocator has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def forget_peak() -> None:
    """Makes peak() start from now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes of memory that this process has ever held at once, or held since forget_peak()."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
