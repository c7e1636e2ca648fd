"""Child processes with expected output. One that ends too early, or prints nothing, fails with its output so far."""

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.waiting import SECONDS


class Child:
    """A process in a session of its own; stdout and stderr are one text. A context: it has ended when it is left."""

    def __init__(self, *command: object, **options: Any) -> None:
        with ignored():
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True, **options,
            )  # fmt: skip
        self._seen: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Returns when so many more lines with the text have come."""
        until = time.monotonic() + SECONDS
        while times:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line with {text!r} came: {self.so_far()}") from None
            if line is None:
                code = self.process.wait(SECONDS)
                raise AssertionError(f"ended with {code} before a line with {text!r} came: {self.so_far()}")
            times -= text in line

    def end(self) -> tuple[int, str]:
        """Waits for the end. -> exit code, all that it said."""
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end: {self.so_far()}") from None
        self._reader.join(SECONDS)
        return code, self.so_far()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._seen.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def so_far(self) -> str:
        """All that it said."""
        return "".join(self._seen)


def histospec(*words: object, **options: Any) -> Child:
    """The `histospec` command. Not in the repository root, where the folder `server` is a second package."""
    return Child(sys.executable, "-m", "histospec.server", *words, cwd=options.pop("cwd", "/"), **options)


@contextmanager
def ignored(numbers: Sequence[int] = ()) -> Iterator[None]:
    """What is started meanwhile ignores these signals, and hears SIGHUP otherwise, even if `nohup` runs the tests."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        assert not numbers
        yield
        return
    actions = {signal.SIGHUP: signal.SIG_DFL} | dict.fromkeys(numbers, signal.SIG_IGN)
    before = {number: signal.signal(number, action) for number, action in actions.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
