"""One thread that writes to a store, taking everything that waits as one group.

Many callers so share the price of a sync or a round trip, and each is told when its own bytes are safe. What may wait
is bounded in bytes: beyond that, callers are refused at once and nothing of theirs is kept in memory.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from histospec.server.arguments import shown
from histospec.server.errors import StoreError, StoreFull

log = structlog.get_logger()
T = TypeVar("T")

# One group takes at most so much, so that nobody waits long for strangers' bytes.
GROUP_BYTES = 32 << 20
MAX_BACKLOG = 256 << 20  # bytes, unless told


@dataclass(eq=False)
class Work(Generic[T]):
    """Something to be written."""

    what: T
    size: int
    done: "Future[Any]" = field(default_factory=Future)


class GroupCommit(Generic[T]):
    """Calls `write(group)` in its own thread; `write` must `settle`, `fail` or `again` every work of the group.

    At the end of that thread it calls `close`. No more than `max_backlog` bytes wait, or one work that is larger.
    """

    def __init__(
        self, write: Callable[[list[Work[T]]], None], close: Callable[[], None], max_backlog: int = MAX_BACKLOG
    ) -> None:
        self._write = write
        self._close = close
        self._queue: queue.SimpleQueue[Work[T] | None] = queue.SimpleQueue()
        self._backlog = 0
        self._max_backlog = max_backlog
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, what: T, size: int) -> "Future[Any]":
        """Has it written. The future fails with StoreFull at once where too much waits already."""
        work = Work(what, size)
        work.done.set_running_or_notify_cancel()  # whoever waits may leave, but what was asked for is done
        with self._lock:
            full = self._backlog > 0 and self._backlog + size > self._max_backlog
            if not full:
                self._backlog += size
        if full:
            text = f"store: more than {shown(self._max_backlog)} (--max-backlog) would wait to be written; try later"
            work.done.set_exception(StoreFull(text))
        else:
            self._queue.put(work)
        return work.done

    @property
    def backlog(self) -> int:
        """Bytes that wait."""
        return self._backlog

    def settle(self, work: Work[T], result: object = None) -> None:
        """The work is done and safe."""
        self._forget(work)
        work.done.set_result(result)

    def again(self, work: Work[T], rest: T) -> None:
        """A part of the work is safe; the rest waits for its turn, behind what waits already."""
        work.what = rest
        self._queue.put(work)

    def fail(self, work: Work[T], error: Exception) -> None:
        """Nothing of the work was kept."""
        self._forget(work)
        work.done.set_exception(error)

    def close(self) -> None:
        """Finishes what was asked for. Blocks."""
        self._queue.put(None)
        self._thread.join()

    def _forget(self, work: Work[T]) -> None:
        with self._lock:
            self._backlog -= work.size

    def _run(self) -> None:
        stopped = False
        while not (stopped and self._queue.empty()):
            group, size = [], 0
            work = self._queue.get()
            while work is not None:
                group.append(work)
                size += work.size
                if size >= GROUP_BYTES:
                    break
                try:
                    work = self._queue.get_nowait()
                except queue.Empty:
                    break
            stopped = stopped or work is None
            try:
                if group:
                    self._write(group)
            except Exception as error:  # a bug: whoever waits is told, and the next group is written
                log.exception("the store failed")
                for work in group:
                    if not work.done.done():
                        self.fail(work, StoreError(f"store: {error!r}; nothing of this request was kept"))
        self._close()
