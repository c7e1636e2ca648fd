"""Reads problems from the store into the index: on demand, or in the background.

A shard that starts, takes over problems, or had to evict some finds the history of a problem again while its first
prompt is being prefilled. Only new responses of that problem wait for the read: they are stored after it, so that none
is read back and indexed twice. Background reads follow the same rule, problem by problem.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from histospec.protocol.arrays import INT32
from histospec.server.errors import StoreError
from histospec.server.history.counts import Counts
from histospec.server.history.gaps import Gaps
from histospec.server.history.indexing import Held, Indexing, lacking
from histospec.server.stores.interface import Problem, Store

log = structlog.get_logger()
T = TypeVar("T")

READERS = 4  # problems read concurrently
WAITING = 4096  # problems that may wait for a read; further ones go without history until their next session
ABSENT = 100_000  # problems remembered as absent from the store ...
ABSENT_SECONDS = 30.0  # ... for this time: another shard may have stored them meanwhile


class Loaded(NamedTuple):
    """The result of loading problems."""

    responses: int = 0
    """Indexed responses."""
    tokens: int = 0
    epoch: int = 0
    """The epoch of the last one."""
    whole: bool = True
    """Whether all of them were read."""


class _Batch:
    """Problems that one thread reads and indexes, one after the other."""

    def __init__(self, store: Store, indexing: Indexing, problems: Sequence[tuple[Problem, bool]]) -> None:
        """`problems`: with each one, whether the index has a part of it."""
        self._store = store
        self._indexing = indexing
        self._problems = problems
        self.done: list[Problem] = []
        self.failed: Problem | None = None
        self.loaded = Loaded()

    def load(self, go_on: Callable[[], bool]) -> None:
        """Blocks. Raises the errors of the store and the index."""
        for problem, part in self._problems:
            if not go_on():
                return
            self.failed = problem
            self._load(problem, self._indexing.held(problem) if part else None)
            self.failed = None
            self.done.append(problem)

    def _load(self, problem: Problem, held: Held | None) -> None:
        for records in self._store.pages(problem):
            if some := lacking(held, records):
                self._indexing.build_stored(problem, some, ahead=True)
                so_far = self.loaded
                tokens = sum(len(record.tokens) for record in some) // INT32.itemsize
                self.loaded = Loaded(so_far.responses + len(some), so_far.tokens + tokens, some[-1].epoch)


class ReadThrough:
    """Used only on the event loop.

    Args:
        store: read in threads.
        indexing: receives the responses that are read.
        counts: counts look-ups and indexed responses.
        gaps: knows the problems of which the index has only a part.

    """

    def __init__(self, store: Store, indexing: Indexing, counts: Counts, gaps: Gaps) -> None:
        self._store = store
        self._indexing = indexing
        self._counts = counts
        self._gaps = gaps
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._reading: dict[Problem, asyncio.Task[Any]] = {}  # by identity; one task may read several
        self._wanted = 0  # problems on demand that are not read yet
        self._calm = asyncio.Event()  # set while there are none
        self._calm.set()
        self._running: set[asyncio.Task[Any] | None] = set()  # tasks that read now
        self._stilled = 0
        self._go = asyncio.Event()
        self._go.set()
        self._absent: OrderedDict[Problem, float] = OrderedDict()  # with the time of the look-up
        self._paused: Counter[Problem] = Counter()

    def want(self, problem: Problem, known: bool | None = None) -> None:
        """Starts to read the problem unless the index has it or the store is known to lack it. Never waits."""
        which = problem.identity
        if not self._lacks(problem, known) or time.monotonic() - self._absent.get(which, -math.inf) < ABSENT_SECONDS:
            return
        if self._wanted >= WAITING:
            self._counts.lookups["skipped"] += 1
            self._gaps.add_part(problem)
            return
        self._wanted += 1
        self._calm.clear()
        self._begin([which], self._read(problem))

    def _lacks(self, problem: Problem, known: bool | None = None) -> bool:
        """Returns whether to read the problem: the index lacks some of it, and no task is already reading it.

        `known`: as in History.want.
        """
        which = problem.identity
        if which in self._reading or self._paused[which]:
            return False
        return self._gaps.part(problem) or not (self._indexing.holds(problem) if known is None else known)

    def _begin(self, which: Iterable[Problem], work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Starts a task that reads these problems, identified by `problem.identity`."""
        task = asyncio.ensure_future(work)
        claimed = list(which)
        self._reading.update(dict.fromkeys(claimed, task))

        def over(_: object) -> None:
            for one in claimed:
                del self._reading[one]
            if not task.cancelled():
                task.exception()  # retrieve it: the caller may have left, and asyncio would log it

        task.add_done_callback(over)
        return task

    @contextmanager
    def paused(self, problem: Problem) -> Iterator[None]:
        """Prevents new reads of the problem; reads that have started go on."""
        which = problem.identity
        self._paused[which] += 1
        try:
            yield
        finally:
            self._paused[which] -= 1
            if not self._paused[which]:
                del self._paused[which]

    async def settled(self, problem: Problem) -> None:
        """Waits until no read of the problem runs. Then removes it from the absent problems."""
        which = problem.identity
        if task := self._reading.get(which):
            await asyncio.wait([task])
        self._absent.pop(which, None)

    async def _read(self, problem: Problem) -> None:
        try:
            async with self._turn():
                with self._counts.store_request():
                    found = await self._read_pages(problem)
                self._gaps.filled(problem)
            if not found:
                self._is_absent(problem)
            self._counts.lookups["hit" if found else "miss"] += 1
        except StoreError as error:
            self._counts.lookups["failed"] += 1
            self._gaps.add_part(problem)
            log.warning("cannot read the history of a problem; it drafts without", reason=str(error))
        except Exception:
            self._gaps.add_part(problem)
            log.exception("cannot index the history of a problem; it drafts without")
        finally:
            self._wanted -= 1
            if not self._wanted:
                self._calm.set()

    async def _read_pages(self, problem: Problem) -> bool:
        """Reads in one thread and indexes in another one. Returns whether the store had responses."""
        read = partial(asyncio.get_running_loop().run_in_executor, self._readers)
        held = await read(self._indexing.held, problem) if self._gaps.part(problem) else None
        pages = self._store.pages(problem)
        found = False
        while (records := await read(next, pages, None)) is not None:
            found |= bool(records)
            if some := lacking(held, records):
                await self._indexing.restore(problem, some)
                self._counts.loaded_responses += len(some)
        return found

    def _is_absent(self, problem: Problem) -> None:
        which = problem.identity
        self._absent[which] = time.monotonic()
        self._absent.move_to_end(which)
        while len(self._absent) > ABSENT:
            self._absent.popitem(last=False)

    # Background reads

    async def calm(self) -> None:
        """Waits until no problem on demand is being read."""
        await self._calm.wait()

    async def load(self, problems: Iterable[Problem], threads: Executor, go_on: Callable[[], bool]) -> Loaded:
        """Reads those problems that the index lacks in one of the threads, while `go_on()` is true.

        Raises StoreError and the errors of the index; then some problems are not read.
        """
        wanted = {problem.identity: problem for problem in problems if self._lacks(problem)}
        if not wanted:
            return Loaded()
        work = self._load(list(wanted.values()), threads, go_on)
        return await asyncio.shield(self._begin(wanted, work))

    async def _load(self, problems: list[Problem], threads: Executor, go_on: Callable[[], bool]) -> Loaded:
        async with self._turn():
            batch = _Batch(self._store, self._indexing, [(one, self._gaps.part(one)) for one in problems])
            try:
                await asyncio.get_running_loop().run_in_executor(threads, batch.load, go_on)
            finally:
                for problem in batch.done:
                    self._gaps.filled(problem)
                if batch.failed is not None:
                    self._gaps.add_part(batch.failed)
                self._counts.loaded_responses += batch.loaded.responses
        return batch.loaded._replace(whole=len(batch.done) == len(problems))

    # Drops and rewinds

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Lets the caller's task read during the block, which starts when no drop or rewind is active."""
        while self._stilled:
            await self._go.wait()
        task = asyncio.current_task()
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Prevents reads during the block, which follows a change of the store. Clears the absent problems."""
        self._stilled += 1
        self._go.clear()
        try:
            self._absent.clear()
            if running := [task for task in self._running if task]:
                await asyncio.wait(running)
            yield
        finally:
            self._stilled -= 1
            if not self._stilled:
                self._go.set()

    async def close(self) -> None:
        """Waits until all reads have ended."""
        while self._reading:
            await asyncio.wait(set(self._reading.values()))
        await asyncio.to_thread(self._readers.shutdown)
