"""Turns other output on stderr into log lines: libraries' `logging`, C code, and Python's last messages.

gRPC's core writes directly to descriptor 2. A pipe replaces the descriptor, and a thread reads the pipe: a JSON log is
JSON throughout, and no library waits for the reader of stderr.
"""

import faulthandler
import fcntl
import logging
import os
import re
import sys
import threading

import structlog

from histospec.server.logs.lines import Throttle

log = structlog.get_logger()

PIPE_BYTES = 1 << 20
LONGEST = 16 << 10  # characters of a line
# gRPC's format: I0000 00:00:1732284123.123456   13659 chttp2_transport.cc:1403] message
CORE_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([\w./-]+:\d+)\] (.*)")
LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
THROTTLE = Throttle()  # any peer can cause these lines, by failing handshakes; the kinds are places in the code


class Library(logging.Handler):
    """Turns the log records of libraries into lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the record. See logging."""
        try:
            if (more := THROTTLE.admits((record.name, record.lineno))) is not None:
                text = _message(record)[:LONGEST]
                error = {"exc_info": record.exc_info[1]} if record.exc_info and record.exc_info[1] else {}
                if isinstance(record.exc_info and record.exc_info[1], UnicodeError):
                    error = {}  # quotes what could not be decoded
                log.log(record.levelno, text, logger=record.name, **error, **more)
        except Exception:  # a log line must not break the library's work
            log.error("a line of a library cannot be shown", logger=record.name)


def _message(record: logging.LogRecord) -> str:
    """Returns the message of a record, with the length of bytes in their place: gRPC logs a token that is not UTF-8."""
    if isinstance(record.args, tuple):
        record.args = tuple(f"{len(one)} bytes" if isinstance(one, bytes) else one for one in record.args)
    return record.getMessage()


def _unraisable(args: "sys.UnraisableHookArgs") -> None:
    log.error("an exception could not be raised", where=repr(args.object), exc_info=args.exc_value)


def _of_a_thread(args: threading.ExceptHookArgs) -> None:
    log.error("a thread failed", thread=args.thread and args.thread.name, exc_info=args.exc_value)


def _log_line(line: str) -> None:
    """Logs a line that was written to stderr."""
    if not line.strip():
        return
    if (found := CORE_LINE.match(line)) is None:
        log.warning(line[:LONGEST], logger="stderr")
    elif (more := THROTTLE.admits(found[2])) is not None:
        log.log(LEVELS[found[1]], found[3][:LONGEST], logger="grpc", source=found[2], **more)


class _Text:
    """Stands in for sys.stderr: never waits, never fails."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self) -> None:
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            self._rest = self._rest[-LONGEST:]
        for line in lines:
            _log_line(line)
        return len(text)

    def flush(self) -> None:
        """Does nothing: only incomplete lines are buffered."""

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


class StderrCapture:
    """Sends descriptor 2, sys.stderr, `logging` and `warnings` to the log.

    Args:
        stderr: a duplicate of the real descriptor 2. A crash writes its last words there, because the log then ends.

    """

    def __init__(self, stderr: int) -> None:
        self._stderr = stderr
        read, write = os.pipe()
        _enlarge(write)
        os.set_blocking(write, False)  # a writer may hold the GIL, which the reading thread needs
        os.dup2(write, 2)
        os.close(write)
        if faulthandler.is_enabled():
            faulthandler.enable(stderr)
        self._sys = sys.stderr
        sys.stderr = _Text()
        logging.basicConfig(handlers=[Library()], level=logging.WARNING, force=True)
        logging.captureWarnings(True)
        sys.unraisablehook, threading.excepthook = _unraisable, _of_a_thread
        self._reader = threading.Thread(target=_read, args=(read,), name="stderr", daemon=True)
        self._reader.start()

    def close(self, seconds: float) -> None:
        """Restores everything. Waits up to `seconds` for earlier output to reach the log."""
        os.dup2(self._stderr, 2)  # closes the pipe's last writer, so its reader reaches the end
        self._reader.join(seconds)
        sys.stderr = self._sys
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        logging.captureWarnings(False)
        logging.basicConfig(level=logging.WARNING, force=True)


def _enlarge(pipe: int) -> None:
    """Enlarges the pipe if the system allows it, for output that arrives while the reading thread waits for the GIL."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            return  # the default size is enough


def _read(pipe: int) -> None:
    rest = b""
    while data := os.read(pipe, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-LONGEST:]
        for line in lines:
            _log_line(line.decode("utf-8", "replace"))
    if rest:
        _log_line(rest.decode("utf-8", "replace"))
    os.close(pipe)
