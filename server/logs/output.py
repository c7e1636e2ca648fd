"""The log of a running server: a thread writes queued lines, so a caller that logs never waits and never fails.

Other output on stderr becomes log lines, too.
"""

import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, cast

import structlog

from histospec.server.logs import lines as logs
from histospec.server.logs.stderr_capture import StderrCapture

log = structlog.get_logger()

MOST_LINES = 10_000  # in the queue
MOST_BYTES = 16 << 20
AGAIN_SECONDS = 0.2
FLUSH_SECONDS = 1.0
CLOSED = -1


class LogWriter:
    """A text file of whole lines for a descriptor that may be full, slow or closed.

    The queue is bounded. If it is full or writing fails, the writer drops lines and counts them. Once writing works
    again, its thread calls `report` with their number.
    """

    def __init__(self, descriptor: int, report: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._report = report
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a finalizer or signal handler may log while another line is being logged
        self._waiting_lines = self._waiting_bytes = 0
        self._reported = 0
        self._cut = False  # the last line was only partly written
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queues a line, which includes its newline. Never waits, never fails."""
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
        """Does nothing: the thread writes lines as soon as it can."""

    def drain(self, seconds: float) -> bool:
        """Waits up to `seconds` until all queued lines are written or dropped. Returns whether they are."""
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
                unreported = self.dropped - self._reported if written else 0
                self._reported += unreported
            if unreported:
                self._report(unreported)

    def _written(self, line: bytes) -> bool:
        """Writes the line. Returns whether all of it was written."""
        left = b"\n" + line if self._cut else line  # after a partial line, start on a new one
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
        except BlockingIOError:  # another process has made the shared descriptor non-blocking
            self._wait()
            return 0

    def _wait(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll(1e3 * AGAIN_SECONDS)
        except OSError:
            time.sleep(AGAIN_SECONDS)


_writers: list[LogWriter] = []


def dropped() -> int:
    """Returns how many lines of this process could not be written."""
    return sum(writer.dropped for writer in _writers)


def drain(seconds: float = FLUSH_SECONDS) -> bool:
    """Waits up to `seconds` until all queued lines are written. Returns whether they are."""
    return all(writer.drain(seconds) for writer in _writers)


@contextmanager
def log_output(form: str, level: str) -> Iterator[None]:
    """Sends the log to stderr, and turns everything else that is written to stderr into log lines.

    Restores stderr at the end; if stderr cannot be written, it stays detached, so that nothing waits for it.
    """
    opened = sys.stderr is not None
    stderr = os.dup(2) if opened else CLOSED
    if not opened:
        _occupy_2()
    writer = LogWriter(stderr, _report_dropped)
    _writers.append(writer)
    logs.configure(form, level, cast(TextIO, writer))
    capture = StderrCapture(stderr) if opened else None  # if stderr was closed, descriptor 2 may be any file
    try:
        yield
    finally:
        if drain() and capture is not None:
            capture.close(FLUSH_SECONDS)
            drain()


def _occupy_2() -> None:
    """Occupies the number of a closed stderr, so that output of C code does not end up in a file."""
    try:
        os.fstat(2)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != 2:
            os.dup2(null, 2)
            os.close(null)


def _report_dropped(lines: int) -> None:
    log.warning("log lines were dropped", lines=lines)
