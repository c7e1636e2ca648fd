"""One thread that writes to a store, and takes all waiting work as one group.

So many callers share the cost of a sync or a round trip, and each learns when its own bytes are safe. The queue is
bounded in bytes: beyond the bound, the store refuses work at once and keeps nothing of it in memory.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from histospec.server.arguments import shown
from histospec.server.errors import StoreBusy, StoreError

log = structlog.get_logger()
T = TypeVar("T")

# A group takes at most this much, so that no caller waits long for the bytes of others.
GROUP_BYTES = 32 << 20
MAX_BACKLOG = 256 << 20  # bytes, by default


@dataclass(eq=False)
class Work(Generic[T]):
    """One piece of work."""

    what: T
    size: int
    done: "Future[Any]" = field(default_factory=Future)


class GroupCommit(Generic[T]):
    """Calls `write(group)` in its own thread; `write` must call `settle`, `fail` or `again` for each work of the group.

    At its end, the thread calls `close`. At most `max_backlog` bytes wait, or one work that is larger.
    """

    def __init__(
        self, write: Callable[[list[Work[T]]], None], close: Callable[[], None], max_backlog: int = MAX_BACKLOG
    ) -> None:
        self._write = write
        self._close = close
        self._queue: queue.SimpleQueue[Work[T] | None] = queue.SimpleQueue()
        self._backlog = 0
        self.max_backlog = max_backlog
        """The bytes that may wait."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, what: T, size: int) -> "Future[Any]":
        """Queues a write. The future fails with StoreBusy at once if too much is waiting."""
        work = Work(what, size)
        work.done.set_running_or_notify_cancel()  # a caller may leave, but cannot cancel the write
        with self._lock:
            full = self._backlog > 0 and self._backlog + size > self.max_backlog
            if not full:
                self._backlog += size
        if full:
            text = f"store: more than {shown(self.max_backlog)} (--max-backlog) would wait to be written; try later"
            work.done.set_exception(StoreBusy(text))
        else:
            self._queue.put(work)
        return work.done

    @property
    def backlog(self) -> int:
        """The bytes that wait."""
        return self._backlog

    def settle(self, work: Work[T], result: object = None) -> None:
        """Marks a work as done and safe."""
        self._forget(work)
        work.done.set_result(result)

    def again(self, work: Work[T], rest: T) -> None:
        """Queues the rest of a work behind all waiting work; the part before the rest is safe."""
        work.what = rest
        self._queue.put(work)

    def fail(self, work: Work[T], error: Exception) -> None:
        """Marks a work as failed; nothing of it was kept."""
        self._forget(work)
        work.done.set_exception(error)

    def close(self) -> None:
        """Finishes the queued work. Blocks."""
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
            except Exception as error:  # a bug: tell the callers, then write the next group
                log.exception("the store failed")
                for work in group:
                    if not work.done.done():
                        self.fail(work, StoreError(f"store: {error!r}; the request is refused"))
        self._close()
