"""HISTOSPEC_RECORD: writes every finished response of this process as a line of a file for `histospec replay`.

The worker puts responses into a bounded queue. A thread makes the lines and appends each with one write, so that
processes of one machine may share a file. The recorder counts responses that it cannot record and logs one warning.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import secrets
import stat
import threading
import weakref
from typing import Any

import numpy as np

from histospec.client.config import Config
from histospec.client.errors import ConfigurationError
from histospec.protocol.arrays import INT32

log = logging.getLogger("histospec.client")

VARIABLE = "HISTOSPEC_RECORD"
MOST_WAITING = 64 << 20
"""How many bytes of tokens may wait to be written. Beyond that the disk is too slow, and recording stops."""
PATIENCE = 1.0
"""How many seconds a shutdown, or the end of the process, waits for the next of the last lines."""


class Recorder:
    """Appends responses to the file. Thread-safe; never raises, never waits for the file.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: str, namespace: str) -> None:
        self._namespace = namespace
        self._worker = secrets.token_hex(4)
        self._writer = _Writer(path, _opened(path))
        self._dropped = weakref.finalize(self, self._writer.finish)
        self._dropped.atexit = False  # type: ignore[misc]  # `_at_exit` also waits

    @property
    def written(self) -> int:
        """How many responses are in the file."""
        return self._writer.written

    @property
    def lost(self) -> int:
        """How many responses could not be recorded."""
        return self._writer.lost

    def keep(
        self,
        prompt: bytes,
        tokens: bytes | bytearray,
        *,
        problem: str = "",
        epoch: int | None = None,
        changes: int = 0,
        seed: int | None = None,
        reward: float | None = None,
        generated: bytes = b"",
    ) -> None:
        """Records one response.

        Args:
            prompt: little-endian int32; must not change afterwards.
            tokens: little-endian int32; must not change afterwards.
            problem: explicit id; empty if the prompt identifies the problem.
            epoch: as for `DraftClient.finish`.
            changes: as for `DraftClient.finish`.
            seed: as for `DraftClient.open`.
            reward: as for `DraftClient.finish`.
            generated: a byte for each token, 0 if the environment wrote it; empty: the policy generated all tokens.
        """
        fields: dict[str, Any] = {"namespace": self._namespace}
        if problem:
            fields["id"] = problem
        if epoch is None:
            fields |= {"changes": changes, "worker": self._worker}
        else:
            fields["epoch"] = epoch
        fields |= {name: value for name, value in (("seed", seed), ("reward", reward)) if value is not None}
        self._writer.put((fields, prompt, tokens, generated))

    def close(self) -> None:
        """Waits for the last lines, while one is written every `PATIENCE` seconds; counts the others as lost.

        A later `keep` starts a new thread.
        """
        self._writer.end()


def recorder(config: Config) -> Recorder | None:
    """Returns the recorder of a configuration, or None if it has none."""
    return None if config.record is None else Recorder(config.record, config.namespace)


_Item = tuple[dict[str, Any], bytes, bytes | bytearray, bytes]


class _Writer:
    """The queue and its thread. It does not refer to the recorder, so that the recorder can be garbage-collected."""

    def __init__(self, path: str, file: int) -> None:
        self.written = 0
        self.lost = 0
        self._path = path
        self._file = file
        self._stopped = False  # the queue takes nothing more, because a file with a gap would look complete
        self._failed = False  # the thread writes nothing more
        self._begin()
        weakref.finalize(self, os.close, file).atexit = False  # type: ignore[misc]
        _writers.add(self)

    def _begin(self) -> None:
        """Starts with an empty queue and no thread, also in a forked process."""
        self._process = os.getpid()
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def put(self, item: _Item) -> None:
        if self._process != os.getpid():
            self._begin()
        size = len(item[1]) + len(item[2])
        with self._lock:
            if not self._stopped and self._waiting + size > MOST_WAITING:
                self._stop(f"the disk is too slow, {MOST_WAITING >> 20} MiB wait")
            if not self._stopped and self._thread is None:
                self._start()
            if self._stopped:
                self.lost += 1
                return
            self._waiting += size
            self._items.put(item)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, args=(self._items,), name="histospec-record", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # too many threads, or the interpreter is shutting down
            self._stop(str(error))

    def finish(self) -> None:
        """Ends the thread after the waiting lines. Takes no lock, because the garbage collector may call it."""
        if self._process == os.getpid():
            self._items.put(None)

    def end(self) -> None:
        """Ends the thread and waits for it."""
        if self._process != os.getpid():  # a thread of the parent may hold the lock
            return
        with self._lock:
            thread, self._thread = self._thread, None
            items, self._items = self._items, queue.SimpleQueue()
        if thread is None:
            return
        items.put(None)
        while thread.is_alive():
            before = self.written + self.lost
            thread.join(PATIENCE)
            if thread.is_alive() and self.written + self.lost == before:
                self._give_up(items)
                return

    def _give_up(self, items: "queue.SimpleQueue[_Item | None]") -> None:
        """Takes from the thread what it has not begun to write."""
        with self._lock:
            left = 0
            with contextlib.suppress(queue.Empty):
                while (item := items.get_nowait()) is not None:
                    self._waiting -= len(item[1]) + len(item[2])
                    left += 1
            items.put(None)
            self.lost += left
            self._stop(f"the disk is too slow, {left} responses are not written")

    def _run(self, items: "queue.SimpleQueue[_Item | None]") -> None:
        while (item := items.get()) is not None:
            why = "" if self._failed else self._append(_line(*item))
            with self._lock:
                self._waiting -= len(item[1]) + len(item[2])
                if why:
                    self._failed = True
                    self._stop(why)
                self.lost += self._failed
                self.written += not self._failed

    def _append(self, line: bytes) -> str:
        """Writes a line with one call. Returns why it could not be written, or an empty text."""
        try:
            if os.write(self._file, line) == len(line):
                return ""
        except OSError as error:
            return (error.strerror or str(error)).lower()
        return "no space left for a whole line"

    def _stop(self, why: str) -> None:
        self._stopped = True
        log.warning("%s: %s: %s; recording stops, the run goes on", VARIABLE, self._path, why)


_writers: "weakref.WeakSet[_Writer]" = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    for writer in list(_writers):
        writer.end()


def _opened(path: str) -> int:
    """Opens the file to append to. A new file is readable by its owner only."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
    except (OSError, ValueError) as error:
        why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise ConfigurationError(
            f"{VARIABLE}: cannot write {path}: {why}; give a file in an existing folder, or unset the variable"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigurationError(f"{VARIABLE}: {path} is a device or a pipe; give a file, or unset the variable")
    return file


def _line(fields: dict[str, Any], prompt: bytes, tokens: bytes | bytearray, generated: bytes) -> bytes:
    """Returns a response as a line in the format of docs/replay.md."""
    text = np.frombuffer(tokens, INT32)
    record = {**fields, "prompt": np.frombuffer(prompt, INT32).tolist()}
    if 0 in generated:
        wrote = np.frombuffer(generated, np.bool_)
        edges = (np.flatnonzero(wrote[1:] != wrote[:-1]) + 1).tolist()
        parts = zip([0, *edges], [*edges, len(text)], strict=True)
        record["turns"] = [
            {"role": "assistant" if wrote[a] else "environment", "tokens": text[a:b].tolist()} for a, b in parts
        ]
    else:
        record["tokens"] = text.tolist()
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
