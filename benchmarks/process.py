"""Child processes, so that their memory can be told from the benchmark's own, and so that they can take turns."""

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
    """An object in a new process: `call(Kind.method, *args)` runs there, in its main thread, and returns the result."""

    def __init__(self, kind: Callable[Args, Held], *args: Args.args, **named: Args.kwargs) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, partial(kind, *args, **named)), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: Callable[Concatenate[Held, Args], object], *args: Args.args, **named: Args.kwargs) -> None:
        """Starts a call without waiting for it."""
        self._connection.send((method, args, named))

    def wait(self) -> Any:
        """Waits for the started call. Returns its result. Raises EOFError if the process died."""
        return self._connection.recv()

    def ended(self, seconds: float) -> bool:
        """Returns whether the started call, or the process, has ended. Waits at most this many seconds."""
        return self._connection.poll(seconds)

    def call(self, method: Callable[Concatenate[Held, Args], Result], *args: Args.args, **named: Args.kwargs) -> Result:
        """Starts a call and returns its result. Raises EOFError as `wait` does."""
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
    """Runs `python -m module args`, with `environment` added to the present one. Returns its last line, read as JSON.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", module, *args]
    told = os.environ | dict(environment or {})
    done = subprocess.run(command, env=told, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process, with a resolution of nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def resident() -> int:
    """Returns the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled() -> int:
    """Returns the resident memory after the allocator has returned free memory, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def forget_peak() -> None:
    """Resets the peak that `peak` returns."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Returns the peak of the resident memory since the start or the last `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
