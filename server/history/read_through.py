"""Brings a problem from the store into the index when it is asked for and the index does not hold it.

A shard that starts empty, one that takes over another's problems, and one that had to evict: all find the history of a
problem again while its first prompt is being prefilled. Nobody waits for it but the problem's own new responses: they
are stored after it was read, so that none is read back and indexed twice.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import structlog

from histospec.server.errors import StoreError
from histospec.server.history.counts import Counts
from histospec.server.history.indexing import Indexing
from histospec.server.stores.interface import Problem, Store, by_epoch

log = structlog.get_logger()

READERS = 4  # problems read side by side
WAITING = 4096  # problems that may wait to be read; beyond it they go without, and are asked for at their next session
ABSENT = 100_000  # problems remembered to have nothing in the store ...
ABSENT_SECONDS = 30.0  # ... for so long: another shard may have owned them meanwhile


class ReadThrough:
    """Lives on the event loop.

    Args:
        store: read in threads.
        indexing: what is read goes there.
        counts: where look-ups are counted.

    """

    def __init__(self, store: Store, indexing: Indexing, counts: Counts) -> None:
        self._store = store
        self._indexing = indexing
        self._counts = counts
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._reading: dict[Problem, asyncio.Task[None]] = {}
        self._absent: OrderedDict[Problem, float] = OrderedDict()  # since when
        self._paused: Counter[Problem] = Counter()

    def want(self, problem: Problem) -> None:
        """Begins to read the problem unless the index has it, or the store is known to have nothing. Never waits."""
        if problem in self._reading or self._paused[problem] or self._indexing.holds(problem):
            return
        if time.monotonic() - self._absent.get(problem, -math.inf) < ABSENT_SECONDS:
            return
        if len(self._reading) >= WAITING:
            self._counts.lookups["skipped"] += 1
            return
        task = asyncio.ensure_future(self._read(problem))
        self._reading[problem] = task
        task.add_done_callback(lambda _: self._reading.pop(problem, None))

    @contextmanager
    def paused(self, problem: Problem) -> Iterator[None]:
        """The problem is not read meanwhile, except for what is on its way."""
        self._paused[problem] += 1
        try:
            yield
        finally:
            self._paused[problem] -= 1
            if not self._paused[problem]:
                del self._paused[problem]

    async def settled(self, problem: Problem) -> None:
        """Waits while the problem is being read; then it is no longer known to be absent."""
        if task := self._reading.get(problem):
            await asyncio.wait([task])
        self._absent.pop(problem, None)

    async def _read(self, problem: Problem) -> None:
        loop = asyncio.get_running_loop()
        try:
            with self._counts.store_request():
                records = await loop.run_in_executor(self._readers, self._store.history, problem)
            batches = list(by_epoch(problem, records))
            if batches:
                await self._indexing.add(batches)
            else:
                self._absent[problem] = time.monotonic()
                self._absent.move_to_end(problem)
                while len(self._absent) > ABSENT:
                    self._absent.popitem(last=False)
            self._counts.lookups["hit" if batches else "miss"] += 1
        except StoreError as error:
            self._counts.lookups["failed"] += 1
            log.warning("a problem's history cannot be read; it drafts without", reason=str(error))

    async def forget(self) -> None:
        """The store has changed: what was absent is asked for again, and nothing read before is indexed after this."""
        self._absent.clear()
        if self._reading:
            await asyncio.wait(self._reading.values())

    async def close(self) -> None:
        """Finishes what is being read."""
        await self.forget()
        await asyncio.to_thread(self._readers.shutdown)
