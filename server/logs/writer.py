"""Writes the log in a thread of its own: a caller that logs never waits and never fails, whatever happens to stderr."""

import os
import queue
import select
import threading
import time
from collections.abc import Callable

MOST_LINES = 10_000  # that wait
MOST_BYTES = 16 << 20
AGAIN_SECONDS = 0.2


class LogWriter:
    """A text file of whole lines, for a descriptor that may be full, slow, or closed.

    What waits is bounded. Beyond that, and where writing fails, lines are dropped and counted; `tell` is called with
    their number, in the writing thread, once writing works again.
    """

    def __init__(self, descriptor: int, tell: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._tell = tell
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a line may be logged while another one is: by a finalizer, by a signal
        self._waiting_lines = self._waiting_bytes = 0
        self._told = 0
        self._cut = False  # the last line was written in part
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Takes a line, with its end. Never waits, never fails."""
        line = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if self._waiting_lines >= MOST_LINES or self._waiting_bytes + len(line) > MOST_BYTES:
                self.dropped += 1
                return len(text)
            self._waiting_lines += 1
            self._waiting_bytes += len(line)
        self._lines.put(line)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: lines are written as soon as they can be."""

    def drain(self, seconds: float) -> bool:
        """Waits so long for what waits to be written, or dropped; whether all of it was."""
        done = threading.Event()
        self._lines.put(done)
        return done.wait(seconds)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            written = self._written(line)
            with self._lock:
                self._waiting_lines -= 1
                self._waiting_bytes -= len(line)
                self.dropped += not written
                untold = self.dropped - self._told if written else 0
                self._told += untold
            if untold:
                self._tell(untold)

    def _written(self, line: bytes) -> bool:
        """Whether the whole line was."""
        left = b"\n" + line if self._cut else line  # what was cut off gets a line of its own
        try:
            while left:
                written = self._write(left)
                left = left[written:]
                self._cut = bool(left) and (self._cut or written > 0)
        except OSError:
            return False
        return True

    def _write(self, text: bytes) -> int:
        try:
            return os.write(self._descriptor, text)
        except BlockingIOError:  # another process has made what it shares with us non-blocking
            self._wait()
            return 0

    def _wait(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll(1e3 * AGAIN_SECONDS)
        except OSError:
            time.sleep(AGAIN_SECONDS)
