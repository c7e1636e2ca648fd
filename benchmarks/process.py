"""Processes of their own: what they hold is told from what the benchmark itself holds, and they can take turns."""

import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

MIB = 1 << 20


class Child:
    """An object in a fresh process: `call("method", *args)` runs there, in its main thread, and returns the result."""

    def __init__(self, kind: Callable[..., object], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, args), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: str, *args: object) -> None:
        """Begins a call without waiting for it."""
        self._connection.send((method, args))

    def result(self) -> object:
        """Waits for what was begun. Raises EOFError if the process died; its traceback is on stderr."""
        return self._connection.recv()

    def ended(self, seconds: float) -> bool:
        """Whether what was begun has ended, or the process; waits so long for it."""
        return self._connection.poll(seconds)

    def call(self, method: str, *args: object) -> object:
        """Begins and waits."""
        self.start(method, *args)
        return self.result()

    def end(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, kind: Callable[..., object], args: tuple[object, ...]) -> None:
    held = kind(*args)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(held, method)(*arguments))


def resident() -> int:
    """Bytes of memory that this process holds, once the allocator has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> None:
    """Makes peak() start from now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes of memory that this process has ever held at once, or held since forget_peak()."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
