"""Keeps the store and the index in step: what is durable is indexed, and after a restart indexed again."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, TypeVar

import numpy as np
import structlog

from histospec.native import Engine
from histospec.protocol.arrays import INT32
from histospec.server.errors import LimitExceeded, StoreError, StoreFull
from histospec.server.history.counts import Counts
from histospec.server.history.gaps import Gaps
from histospec.server.history.learning import Learning
from histospec.server.history.read_through import ReadThrough
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Batch, Problem, Record, Store, total_size

log = structlog.get_logger()
T = TypeVar("T")

LOG_EVERY_SECONDS = 5.0
LOOK_SECONDS = 0.005  # between two looks whether the index has room again
LONGEST_WAIT = 10.0  # seconds for that; then the caller is told to come back
CROWDED = f"store: for {LONGEST_WAIT:g} seconds responses have come faster than the index takes them; try later"
UNINDEXED = 128 << 20  # bytes of ingests that may wait for the store and the index
INDEX_TOKENS = 1 << 20  # of one call: building takes 48 bytes a token meanwhile
WATCH_SECONDS = 3.0  # between looks at what other shards have stored


class History:
    """The finished responses of all problems of this shard."""

    def __init__(self, engine: Engine, store: Store, max_namespaces: int) -> None:
        self._engine = engine
        self._store = store
        self.counts = Counts()
        self._newest = store.newest_epochs()
        self._namespaces = set(self._newest)
        self._named: set[str] = set()  # namespaces whose epochs somebody names
        self._max_namespaces = max_namespaces
        self._backwards = 0  # how often the newest epochs went back: what was read before that no longer counts
        self._watching: asyncio.Task[None] | None = None
        self._learning = Learning(engine, store, self.counts)
        self._learning.restore()
        # Building an index takes milliseconds: it must not hold up the drafts on the event loop.
        self._indexing = ThreadPoolExecutor(1, thread_name_prefix="index")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._through = ReadThrough(store, self._knows, self._index, self._indexing, self.counts)
        self._begun: set[asyncio.Task[Any]] = set()
        self._unindexed = 0
        self._said: Counter[str] = Counter()
        self.loaded = asyncio.Event()
        self.progress = "not started"
        self._closing = False
        self._gaps = Gaps(engine)

    def newest_epoch(self, namespace: str) -> int:
        """The newest epoch that the namespace has seen; 0 at first."""
        return self._newest.get(namespace, 0)

    def name_epochs(self, namespace: str) -> None:
        """Somebody names the namespace's epochs: from now on nobody's count moves them."""
        self._named.add(namespace)

    def counted_epoch(self, namespace: str, epoch: int) -> int:
        """The epoch of a response that a worker's count says is of `epoch`; never older than the newest."""
        newest = self.newest_epoch(namespace)
        return newest if namespace in self._named else max(newest, epoch)

    def admit(self, namespace: str) -> None:
        """Makes room for a namespace. Raises LimitExceeded where there are too many already."""
        if namespace in self._namespaces:
            return
        if len(self._namespaces) >= self._max_namespaces:
            self._named.discard(namespace)
            text = f"namespace: the server has its limit of {self._max_namespaces} namespaces; drop one, or raise "
            raise LimitExceeded(f"{text}--max-namespaces")
        self._namespaces.add(namespace)

    async def room(self) -> bool:
        """Waits while responses come faster than the index takes them. False: they still do."""
        until = time.monotonic() + LONGEST_WAIT
        while self._engine.congested() or self._unindexed > UNINDEXED:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    async def add(self, batch: Batch) -> None:
        """Stores responses, then indexes them. Raises StoreError, and then nothing of the batch is kept."""
        if not await self.room():
            raise StoreFull(CROWDED)
        self._unindexed += total_size(batch.records)  # before others look for room
        await self._to_the_end(self._add(batch))

    async def _add(self, batch: Batch) -> None:
        namespace = batch.problem.namespace
        life = self._gaps.life(namespace)
        try:
            self.want(batch.problem)
            with self._through.paused(batch.problem):  # what is stored here must not be read back before it is indexed
                await self._append(batch)
                self.saw(batch)
                try:
                    await self._in(self._indexing, lambda: self._index(batch))
                except BaseException:
                    self._gaps.add(namespace)
                    raise
                self._gaps.stored(namespace, life)
        finally:
            self._unindexed -= total_size(batch.records)

    def want(self, problem: Problem) -> None:
        """Begins to bring the problem into the index, where that does not hold it. Never waits."""
        if not self._store.whole_at_start or (self.loaded.is_set() and self._gaps.possible(problem.namespace)):
            self._through.want(problem)

    def life(self, namespace: str) -> object:
        """What `store` is to be given for what the index gets from now on."""
        return self._gaps.life(namespace)

    def _knows(self, problem: Problem) -> bool:
        prompt = np.frombuffer(problem.prompt, INT32)
        return self._engine.knows(problem.namespace, prompt, problem=problem.name or None)

    async def store(self, batch: Batch, life: object) -> None:
        """Stores responses that the index already has, and did not have before `life`. Raises StoreError."""
        await self._append(batch)
        self._gaps.stored(batch.problem.namespace, life)

    async def _append(self, batch: Batch) -> None:
        await self._through.settled(batch.problem)
        try:
            await asyncio.wrap_future(self._store.append(batch))
        except StoreError:
            self.counts.store_errors += 1
            raise
        self._count(len(batch.records), _tokens(batch))

    def _count(self, responses: int, tokens: int) -> None:
        self.counts.stored_responses += responses
        self.counts.stored_tokens += tokens
        if not self._said:  # one line for all that arrives in the same few seconds
            nobody = Context()  # else the line would name the request that happened to come first
            asyncio.get_running_loop().call_later(LOG_EVERY_SECONDS, self._report, context=nobody)
        self._said.update(responses=responses, tokens=tokens, batches=1)

    def _report(self) -> None:
        if self._said:
            log.info("stored", **self._said)
            self._said.clear()

    def saw(self, batch: Batch) -> None:
        """Remembers the newest epoch."""
        namespace = batch.problem.namespace
        epochs = [record.epoch for record in batch.records]
        self._newest[namespace] = max([self.newest_epoch(namespace), *epochs])

    async def get(self, problem: Problem, limit: int, room: int) -> list[Record]:
        """The stored responses, oldest first. Raises StoreError, and LimitExceeded beyond `room` bytes."""
        try:
            return await asyncio.to_thread(self._store.history, problem, limit, room)
        except StoreError:
            self.counts.store_errors += 1
            raise

    async def drop(self, namespace: str) -> int:
        """Forgets a namespace in the store and in the index; returns how many responses were stored."""
        await self.loaded.wait()  # else what is being loaded would come back
        return await self._to_the_end(self._drop(namespace))

    async def _drop(self, namespace: str) -> int:
        async with self._forgetting(namespace):
            try:
                dropped = await asyncio.wrap_future(self._store.drop(namespace))
            except StoreError:
                self.counts.store_errors += 1
                raise
            self._newest.pop(namespace, None)
            self._named.discard(namespace)
            self._backwards += 1
            await self._through.forget()
            await self._in(self._indexing, lambda: self._engine.drop_namespace(namespace))
        self._namespaces.discard(namespace)
        return dropped

    async def rewind(self, namespace: str, epoch: int) -> int:
        """Forgets the responses of newer epochs; returns how many were stored. The index reads the rest when asked."""
        await self.loaded.wait()
        return await self._to_the_end(self._rewind(namespace, epoch))

    async def _rewind(self, namespace: str, epoch: int) -> int:
        async with self._forgetting(namespace):
            try:
                forgotten = await asyncio.wrap_future(self._store.rewind(namespace, epoch))
            except StoreError:
                self.counts.store_errors += 1
                raise
            if namespace in self._newest:
                self._newest[namespace] = min(self._newest[namespace], epoch)
            self._backwards += 1
            await self._through.forget()
            await self._in(self._indexing, lambda: self._engine.drop_namespace(namespace, keep_learned=True))
        self._gaps.add(namespace)  # the rest of it
        return forgotten

    @asynccontextmanager
    async def _forgetting(self, namespace: str) -> AsyncIterator[None]:
        async with self._learning.forgetting(namespace):
            with self._gaps.forgetting(namespace):
                yield

    async def load(self) -> None:
        """Indexes everything that the store holds; from now on, what is learned is saved."""
        self._learning.start()
        if not self._store.whole_at_start:
            self._watching = asyncio.ensure_future(self._watch())
        await self._in(self._loading, self._load)
        self.loaded.set()

    async def _watch(self) -> None:
        """Hears of the epochs that other shards have seen."""
        throttle = Throttle(1, 60.0)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._hear()
            except StoreError as error:
                if (left_out := throttle.admits("failed")) is not None:
                    log.warning("the newest epochs of other shards are not known", reason=str(error), **left_out)

    async def _hear(self) -> None:
        before = self._backwards
        newest = await self._in(self._loading, self._store.newest_epochs)
        if before == self._backwards:
            self._newest.update({name: max(self.newest_epoch(name), epoch) for name, epoch in newest.items()})

    def _load(self) -> None:
        if not self._store.whole_at_start:
            self.progress = "read when asked for"
            return
        started = said = time.monotonic()
        total, responses, tokens = self._store.count(), 0, 0
        for batch in self._store.load():
            if self._closing:
                return
            self._index(batch)
            responses += len(batch.records)
            tokens += _tokens(batch)
            self.counts.loaded_responses = responses
            self.progress = f"loaded {responses} of {total} responses"
            if time.monotonic() - said > LOG_EVERY_SECONDS:
                said = time.monotonic()
                log.info("loading", responses=responses, of=total, tokens=tokens)
        self.progress = "loaded"
        log.info("loaded", responses=responses, tokens=tokens, seconds=round(time.monotonic() - started, 3))

    def _index(self, batch: Batch) -> None:
        some: list[Record] = []
        size = 0
        for record in batch.records:
            if some and size + len(record.tokens) > INDEX_TOKENS * INT32.itemsize:
                self._ingest(batch.problem, some)
                some, size = [], 0
            some.append(record)
            size += len(record.tokens)
        self._ingest(batch.problem, some)

    def _ingest(self, problem: Problem, records: list[Record]) -> None:
        masks = [np.frombuffer(r.generated, np.uint8) if r.generated else None for r in records]
        self._engine.ingest(
            problem.namespace,
            np.frombuffer(problem.prompt, INT32),
            [np.frombuffer(record.tokens, INT32) for record in records],
            epoch=records[0].epoch,
            rewards=[record.reward for record in records],
            problem=problem.name or None,
            generated=masks,
            seeds=[record.seed for record in records],
        )

    async def _in(self, executor: ThreadPoolExecutor, run: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, run)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Finishes what was begun although its caller leaves: else the index would not know what the store does."""
        task = asyncio.ensure_future(work)
        self._begun.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._begun.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to take it

    async def close(self) -> None:
        """Finishes what was begun, gives up what is being loaded, saves what was learned, and closes the store."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        if self._begun:
            await asyncio.wait(self._begun)
        await self._through.close()
        try:
            await self._learning.close()
        finally:
            await asyncio.to_thread(self._close)
            self._report()

    def _close(self) -> None:
        self._indexing.shutdown()
        self._loading.shutdown()
        self._store.close()


def _tokens(batch: Batch) -> int:
    return sum(len(record.tokens) for record in batch.records) // INT32.itemsize
