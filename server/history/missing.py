"""Knows which stored responses the index may lack, and reads them: on demand, or in the background.

A shard that starts, takes over problems, or had to evict some reads the history of a problem again while its first
prompt is being prefilled. One task at a time reads a problem, and new responses of the problem reach the store after
that, so that none is read back and indexed twice.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
import xxhash

from histospec.protocol.arrays import INT32
from histospec.protocol.placement import problem_digest
from histospec.server.errors import StoreError
from histospec.server.history.counts import Counts
from histospec.server.history.indexing import Indexing, lacking
from histospec.server.stores.interface import Problem, Store

log = structlog.get_logger()
T = TypeVar("T")

READERS = 4  # problems read concurrently on demand
WAITING = 4096  # problems that may wait for a read; further ones go without history until their next session
WAITING_BYTES = 64 << 20  # of their prompts
PARTS = 100_000  # partly indexed problems to remember
ABSENT = 100_000  # problems remembered as absent from the store ...
ABSENT_SECONDS = 30.0  # ... for this time: another shard may have stored them meanwhile


@dataclass
class Reading:
    """Problems that one thread reads and indexes, one after the other, and how far it has come."""

    problems: list[tuple[Problem, bool]] = field(default_factory=list)
    """With each one, whether the index has a part of it."""
    done: list[Problem] = field(default_factory=list)
    failed: Problem | None = None
    found: bool = False
    """Whether the store had responses."""
    responses: int = 0
    """Indexed responses."""
    tokens: int = 0
    epoch: int = 0
    """The epoch of the last one."""

    @property
    def whole(self) -> bool:
        """Whether all of the problems were read."""
        return len(self.done) == len(self.problems)

    def run(self, store: Store, indexing: Indexing, ahead: bool, go_on: Callable[[], bool]) -> None:
        """Blocks. Raises the errors of the store and the index."""
        for problem, part in self.problems:
            if not go_on():
                return
            self.failed = problem
            held = indexing.held(problem) if part else None
            for records in store.pages(problem):
                self.found |= bool(records)
                if some := lacking(held, records):
                    indexing.restore(problem, some, ahead)
                    self.responses += len(some)
                    self.tokens += sum(len(record.tokens) for record in some) // INT32.itemsize
                    self.epoch = some[-1].epoch
            self.failed = None
            self.done.append(problem)


class Missing:
    """The stored responses that the index lacks. Used only on the event loop.

    The index may lack a whole namespace, because the server has not loaded it or it was rewound. Or it has only a part
    of a problem, because newer responses came while the older ones could not be read.

    The index may also forget a response while it is being stored, because its namespace is dropped or rewound. So each
    namespace has a generation, a number that changes with a drop or a rewind: `want` returns it before the index
    receives a response, and `storing` compares it once the response is stored.
    """

    def __init__(self, store: Store, indexing: Indexing, counts: Counts) -> None:
        self._store = store
        self._indexing = indexing
        self._counts = counts
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="read")

        self._whole = False  # the index has all that the store had at the start
        self._incomplete: set[str] = set()  # namespaces
        self._parts: OrderedDict[int, None] = OrderedDict()  # digests of problems
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # by `problem_digest`: the time of the look-up
        self._generations: dict[str, int] = {}  # by namespace
        self._changes = 0  # beginnings and ends of drops and rewinds

        # Problems are identified by `Problem.identity`.
        self._early: set[Problem] | None = set()  # wanted before the store was open; then None
        self._reading: dict[Problem, asyncio.Task[Any]] = {}  # one task may read several
        self._on_demand: set[asyncio.Task[Any]] = set()  # of these
        self._waiting_bytes = 0  # of the prompts in `_early` or of `_on_demand`
        self._storing: Counter[Problem] = Counter()  # problems with responses that are being stored
        self._running: set[asyncio.Task[Any]] = set()  # tasks that read now
        self._go = asyncio.Event()  # cleared during a drop or a rewind
        self._go.set()

    def open(self) -> None:
        """Starts to read: the store is open."""
        wanted, self._early, self._waiting_bytes = self._early or (), None, 0
        for problem in wanted:
            self.want(problem)

    def loaded(self) -> None:
        """Records that the index has everything that the store had at the start."""
        self._whole = True

    def add(self, problem: Problem) -> None:
        """Records that the index lacks a stored response of the problem."""
        self._incomplete.add(problem.namespace)
        self._add_part(problem)

    def want(self, problem: Problem, known: bool = False) -> int:
        """Starts to read the problem if the store may have responses of it that the index lacks. Never waits.

        Returns the generation of the namespace, for `storing`.

        Args:
            problem: of a session or an ingest that begins.
            known: whether the caller knows that the index has finished responses of it; if not, `want` asks the index.

        """
        generation = self._generations.setdefault(problem.namespace, self._changes)
        if self._early is not None:
            if problem not in self._early and self._may_wait(problem, len(self._early)):
                self._early.add(problem)
                self._waiting_bytes += len(problem.prompt)
        elif self._possible(problem) and not self._is_absent(problem) and self._lacks(problem, known):
            if self._may_wait(problem, len(self._on_demand)):
                self._read_on_demand(problem)
            else:
                self._counts.lookups["skipped"] += 1
                self._add_part(problem)
        return generation

    def _may_wait(self, problem: Problem, others: int) -> bool:
        """Returns whether a problem may wait for a read while so many others do."""
        return others < WAITING and self._waiting_bytes + len(problem.prompt) <= WAITING_BYTES

    def _possible(self, problem: Problem) -> bool:
        """Returns whether the store may have responses of the problem that the index lacks."""
        if not self._whole or problem.namespace in self._incomplete:
            return True
        return self._has_part(problem) or self._indexing.evicted()

    def _lacks(self, problem: Problem, known: bool = False) -> bool:
        """Returns whether to read the problem: the index lacks some of it, and no task is already reading it."""
        which = problem.identity
        if which in self._reading or self._storing[which]:
            return False
        return self._has_part(problem) or not (known or self._indexing.holds(problem))

    def _has_part(self, problem: Problem) -> bool:
        return bool(self._parts) and _digest(problem) in self._parts

    def _add_part(self, problem: Problem) -> None:
        """Records that stored responses of a problem could not be read or indexed; the index may have newer ones."""
        self._parts[_digest(problem)] = None
        while len(self._parts) > PARTS:
            self._parts.popitem(last=False)

    def _is_absent(self, problem: Problem) -> bool:
        if not self._absent:
            return False
        return time.monotonic() - self._absent.get(problem_digest(*problem), -math.inf) < ABSENT_SECONDS

    def _add_absent(self, problem: Problem) -> None:
        """Records that the store has no response of a problem now; forgets expired look-ups."""
        now = time.monotonic()
        digest = problem_digest(*problem)
        self._absent.pop(digest, None)
        while self._absent and (
            len(self._absent) >= ABSENT or now - next(iter(self._absent.values())) >= ABSENT_SECONDS
        ):
            self._absent.popitem(last=False)
        self._absent[digest] = now

    # Reads

    def _begin(self, problems: Iterable[Problem], work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Starts a task that reads these problems."""
        task = asyncio.ensure_future(work)
        claimed = list(problems)
        self._reading.update(dict.fromkeys(claimed, task))

        def over(_: object) -> None:
            for problem in claimed:
                del self._reading[problem]

        task.add_done_callback(over)
        return task

    def _read_on_demand(self, problem: Problem) -> None:
        task = self._begin([problem.identity], self._read(problem))
        self._on_demand.add(task)
        self._waiting_bytes += len(problem.prompt)

        def over(_: object) -> None:
            self._on_demand.discard(task)
            self._waiting_bytes -= len(problem.prompt)

        task.add_done_callback(over)

    async def _read(self, problem: Problem) -> None:
        """Reads a problem on demand."""
        try:
            with self._counts.store_request():
                reading = await self._run([problem], self._readers)
        except StoreError as error:
            self._counts.lookups["failed"] += 1
            log.warning("cannot read the history of a problem; it drafts without", reason=str(error))
        except Exception:
            log.exception("cannot index the history of a problem; it drafts without")
        else:
            self._counts.lookups["hit" if reading.found else "miss"] += 1
            if not reading.found:
                self._add_absent(problem)

    async def calm(self) -> None:
        """Waits until no problem is being read on demand."""
        while self._on_demand:
            await asyncio.wait(self._on_demand)

    async def load(self, problems: Iterable[Problem], threads: Executor, go_on: Callable[[], bool]) -> Reading:
        """Reads those problems that the index lacks in one of the threads, while `go_on()` is true.

        Raises StoreError and the errors of the index; then some problems are not read.
        """
        wanted = {problem.identity: problem for problem in problems if self._lacks(problem)}
        if not wanted:
            return Reading()
        return await self._begin(wanted, self._run(list(wanted.values()), threads, True, go_on))

    async def _run(
        self, problems: list[Problem], threads: Executor, ahead: bool = False, go_on: Callable[[], bool] = lambda: True
    ) -> Reading:
        """Reads problems in one of the threads when no drop or rewind is active. `ahead`: no caller wants them yet."""
        while not self._go.is_set():
            await self._go.wait()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        reading = Reading([(problem, self._has_part(problem)) for problem in problems])
        try:
            run = asyncio.get_running_loop().run_in_executor
            await run(threads, reading.run, self._store, self._indexing, ahead, go_on)
        finally:
            self._running.discard(task)
            for problem in reading.done if self._parts else ():
                self._parts.pop(_digest(problem), None)
            if reading.failed is not None:
                self._add_part(reading.failed)
            self._counts.loaded_responses += reading.responses
        return reading

    # New responses, drops and rewinds

    @asynccontextmanager
    async def storing(self, problem: Problem, generation: int) -> AsyncIterator[None]:
        """The block stores new responses of the problem. No read of the problem runs during the block.

        `generation`: as `want` returned it before the index received the responses.
        """
        which = problem.identity
        self._storing[which] += 1
        try:
            if task := self._reading.get(which):
                await asyncio.wait([task])
            if self._absent:
                self._absent.pop(problem_digest(*problem), None)
            yield
        finally:
            self._storing[which] -= 1
            if not self._storing[which]:
                del self._storing[which]
        if self._generations.get(problem.namespace) != generation:
            self.add(problem)

    @contextmanager
    def forgetting(self, namespace: str, keeps: bool) -> Iterator[None]:
        """The block makes the store, and then the index, forget the namespace. One block runs at a time.

        `keeps`: whether the store keeps a part of it.
        """
        was_incomplete = namespace in self._incomplete
        self._incomplete.discard(namespace)
        self._generations.pop(namespace, None)
        self._changes += 1
        try:
            yield
        except BaseException:
            if was_incomplete:
                self._incomplete.add(namespace)
            raise
        self._changes += 1
        # A session or an ingest that began meanwhile may have stored responses that the index then forgot.
        if self._generations.pop(namespace, None) is not None or keeps:
            self._incomplete.add(namespace)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Prevents reads during the block, which makes the index forget what the store has forgotten."""
        self._go.clear()
        try:
            self._absent.clear()
            if self._running:
                await asyncio.wait(self._running)
            yield
        finally:
            self._go.set()

    async def close(self) -> None:
        """Waits until all reads have ended."""
        while self._reading:
            await asyncio.wait(set(self._reading.values()))
        await asyncio.to_thread(self._readers.shutdown)


def _digest(problem: Problem) -> int:
    """Returns a digest of a problem. If two problems share one, reading one of them again is unneeded but harmless."""
    namespace, prompt, name = problem.identity
    return xxhash.xxh3_128_intdigest(b"\0".join((namespace.encode(), name.encode(), prompt)))
