"""The process of a command: its standard streams, and the signals that end it.

It imports little, so that its handlers are in place while the modules of the command are being imported.
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
"""Seconds. `timeout`, a terminal that closes, or a shell that ends may send one signal twice in a row."""


class Interrupted(KeyboardInterrupt):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def run(command: Callable[[], int]) -> int:
    """Runs the command that this process is for. -> its exit code; 128 + N where signal N ended it."""
    global _signals
    _open_streams()
    _signals = _Signals()
    code = _quietly(command)
    code = _quietly(lambda: _flush(code))
    _signals.stop()
    if _signals.caught is not None:
        os._exit(128 + _signals.caught)  # does not wait for threads that may never end
    return code


def imported(logs: bool) -> None:
    """The modules of the command are there: from now on, a signal lets it clean up.

    logs: the command looks after stderr itself; for others, a stderr that cannot be written is no reason to stop.
    """
    if _signals is None:  # the process is for something else
        return
    _signals.raising = True
    if not logs:
        sys.stderr = _text(_Errors(_raw(2)), sys.stderr.encoding, line_buffering=True)


def ends(number: int) -> bool:
    """Whether a signal is to end this process. After `nohup`, which ignores SIGHUP, that one is not."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def run_loop(work: "Coroutine[Any, Any, T]") -> T:
    """Runs a coroutine in a loop of its own; a signal cancels it, instead of being raised inside of some callback."""
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
    """The first signal raises Interrupted, so that the command can clean up. A later one ends the process at once.

    So does one that comes during imports: there is nothing to clean up, and what Python calls from C may drop what is
    raised.
    """

    def __init__(self) -> None:
        self.raising = False
        self.caught: int | None = None
        self._when = 0.0
        for number in filter(ends, ENDING):
            signal.signal(number, self._end)
        sys.unraisablehook = self._unraisable

    def stop(self) -> None:
        """From now on a signal ends the process at once."""
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
        """Python drops what is raised in a finalizer: raises Interrupted again a moment later."""
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
    """The standard output: errors say that they are about it."""

    def write(self, data: Any) -> int:
        with _about(STDOUT):
            return super().write(data)

    def flush(self) -> None:
        with _about(STDOUT):
            super().flush()


class _Errors(io.BufferedWriter):
    """Standard error: what it does not take is lost."""

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
    """Makes descriptors 0, 1 and 2 usable: a file that took the place of a closed one would be written over."""
    for number in (0, 1, 2):
        if not _is_open(number):
            # The wrong way round, so that reading and writing fail as they would have, but for lines on stderr.
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
    """A stream of text; what the encoding lacks is written as an escape."""
    return io.TextIOWrapper(binary, encoding, "backslashreplace", line_buffering=line_buffering)


def _quietly(command: Callable[[], int]) -> int:
    """Its exit code, also where argparse or rich ended it."""
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
        # What is left in the buffer goes nowhere: else the interpreter tries again at its end, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if code == 0 and not isinstance(error, BrokenPipeError):
            say(f"histospec: {STDOUT}: {(error.strerror or str(error)).lower()}")
        return code or 1
    return code


def say(sentence: str) -> None:
    """Writes a line to stderr; where nothing can be written there, the exit code has to do."""
    with suppress(OSError):
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
