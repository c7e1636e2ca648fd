"""The process of a command: its standard streams and the signals that end it.

This module imports little, so that its signal handlers are in place before the command's modules are imported.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STDOUT = "the standard output"
T = TypeVar("T")
TOGETHER = 1.0
"""Seconds. `timeout`, a closing terminal or a shell that exits may send the same signal twice within this time."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def run(command: Callable[[], int]) -> int:
    """Runs the command of this process. Returns its exit code, or 128 + N if signal N ended it."""
    global _signals
    _open_streams()
    _signals = _Signals()
    code = _quietly(command)
    code = _quietly(lambda: _flush(code))
    _signals.stop()
    if _signals.caught is not None:
        os._exit(128 + _signals.caught)  # does not wait for threads, which may never end
    return code


def imported(logs: bool) -> None:
    """Marks the command's modules as imported: from now on, a signal lets the command clean up.

    `logs`: the command handles stderr itself. Other commands ignore errors of stderr.
    """
    if _signals is None:  # the process runs something else
        return
    _signals.raising = True
    if not logs:
        sys.stderr = _text(_Errors(_raw(2)), sys.stderr.encoding, line_buffering=True)


def ends(number: int) -> bool:
    """Returns whether a signal ends this process. After `nohup`, which ignores SIGHUP, SIGHUP does not."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def run_loop(work: "Coroutine[Any, Any, T]") -> T:
    """Runs a coroutine in a new event loop. A signal cancels the coroutine; it does not raise inside a callback."""
    import asyncio

    caught: list[int] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def cancel(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, cancel, number)
        return await task

    handlers = {number: signal.getsignal(number) for number in ENDING if ends(number)}
    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if _signals is not None:
            _signals.caught = caught[0]
        raise Interrupted(caught[0]) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Signals:
    """The first signal raises Interrupted, so that the command can clean up. A second one ends the process at once.

    So does a signal during imports: there is nothing to clean up yet, and C code that calls Python may drop the
    exception.
    """

    def __init__(self) -> None:
        self.raising = False
        self.caught: int | None = None
        self._when = 0.0
        for number in filter(ends, ENDING):
            signal.signal(number, self._end)
        sys.unraisablehook = self._unraisable

    def stop(self) -> None:
        """Makes every further signal end the process at once."""
        self.raising = False

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.raising:
            os._exit(128 + number)
        if self.caught is not None:
            if time.monotonic() - self._when > TOGETHER:
                os._exit(128 + number)
            return
        self.caught, self._when = number, time.monotonic()
        raise Interrupted(number)

    def _unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raises Interrupted again shortly after a finalizer, in which Python drops exceptions."""
        if not isinstance(unraisable.exc_value, Interrupted):
            sys.__unraisablehook__(unraisable)
            return
        number = unraisable.exc_value.number

        def again(_: int, frame: FrameType | None) -> None:
            raise Interrupted(number)

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, 0.01)


_signals: _Signals | None = None


class _Output(io.BufferedWriter):
    """The standard output; its errors name it."""

    def write(self, data: Any) -> int:
        with _about(STDOUT):
            return super().write(data)

    def flush(self) -> None:
        with _about(STDOUT):
            super().flush()


class _Errors(io.BufferedWriter):
    """Standard error; it drops what it cannot write."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def _about(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = name
        raise


def _open_streams() -> None:
    """Opens descriptors 0, 1 and 2 if they are closed: otherwise the next file opened would receive the output."""
    for number in (0, 1, 2):
        if not _is_open(number):
            # Open in the opposite mode, so that I/O raises EBADF. Messages on stderr are lost.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_WRONLY)
    if sys.stderr is None:
        sys.stderr = _text(_Errors(_raw(2)), "utf-8", line_buffering=True)
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    sys.stdout = _text(_Output(_raw(1)), encoding, line_buffering=os.isatty(1))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _raw(number: int) -> io.FileIO:
    return io.FileIO(number, "w", closefd=False)


def _text(binary: io.BufferedWriter, encoding: str, line_buffering: bool) -> TextIO:
    """Returns a text stream that escapes characters which the encoding lacks."""
    return io.TextIOWrapper(binary, encoding, "backslashreplace", line_buffering=line_buffering)


def _quietly(command: Callable[[], int]) -> int:
    """Returns the command's exit code, also if argparse or rich exits."""
    try:
        return command()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        # Discard the buffer: otherwise the interpreter writes it again at exit, and fails with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if code == 0 and not isinstance(error, BrokenPipeError):
            say(f"histospec: {STDOUT}: {(error.strerror or str(error)).lower()}")
        return code or 1
    return code


def say(sentence: str) -> None:
    """Writes a line to stderr. Ignores errors: the exit code still reports the failure."""
    with suppress(OSError):
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
