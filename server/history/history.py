"""Keeps the store and the index consistent: the index has what the store has, also after a restart."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from histospec.native import Engine
from histospec.server.errors import StoreBusy, StoreFull, StoreOpening
from histospec.server.history.back_pressure import CROWDED, LONGEST_WAIT, LOOK_SECONDS, BackPressure
from histospec.server.history.counts import Counts
from histospec.server.history.epoch_watch import EpochWatch
from histospec.server.history.epochs import Epochs
from histospec.server.history.gaps import Gaps
from histospec.server.history.indexing import Indexing
from histospec.server.history.learning import Learning
from histospec.server.history.loading import Loading
from histospec.server.history.namespaces import Namespaces
from histospec.server.history.read_through import WAITING, ReadThrough
from histospec.server.history.stored_lines import StoredLines
from histospec.server.history.unfinished import Unfinished
from histospec.server.stores.interface import Problem, Reader, Record, ResponseBatch, Store

log = structlog.get_logger()
T = TypeVar("T")


class History:
    """The finished responses of all problems of this shard. Decides when the store and the index receive each one."""

    def __init__(self, engine: Engine, store: Store, max_namespaces: int) -> None:
        self.counts = Counts()
        self.epochs = Epochs({})
        self.namespaces = Namespaces(max_namespaces)
        self.back_pressure = BackPressure(engine, store)
        self._store = store
        self._learning = Learning(engine, store, self.counts)
        self._indexing = Indexing(engine)
        self._gaps = Gaps(engine, whole=False)
        self._read_through = ReadThrough(store, self._indexing, self.counts, self._gaps)
        self.loading = Loading(store, self._read_through, self._gaps, self.counts, self._indexing.share)
        self._epoch_watch = EpochWatch(store, self.epochs, self._replaced)
        self._stored_lines = StoredLines()
        self._unfinished = Unfinished()
        self._open = False
        self._wanted: set[Problem] = set()  # used while the store is not open

    @property
    def opening(self) -> str:
        """Why nothing can be stored yet, as a sentence for callers; empty if the store is open."""
        if self._open:
            return ""
        return f"store: it is not open yet ({self._store.opening or 'its namespaces are being read'}); try later"

    async def open(self, newest: dict[str, int]) -> None:
        """Starts to use the open store. `newest` holds its namespaces and their newest epochs."""
        self.epochs.merge(newest, self.epochs.setbacks)
        self.namespaces.know(newest)
        await asyncio.to_thread(self._learning.restore)
        self._open = True
        wanted, self._wanted = self._wanted, set()
        for problem in wanted:
            self.want(problem)

    async def load(self) -> None:
        """Starts to index the contents of the store, and to save estimators.

        The history is ready for callers: it reads a problem from the store on demand.

        Raises StoreError if the store is not open and cannot be read.
        """
        if not self._open:
            await self.open(await asyncio.to_thread(self._store.newest_epochs))
        self._learning.start()
        self._epoch_watch.start()
        self.loading.start()

    @property
    def trouble(self) -> str:
        """Why nothing can be stored until a person acts; empty if it can."""
        return self._store.trouble

    async def add(self, batch: ResponseBatch, patience: float = LONGEST_WAIT) -> None:
        """Stores responses, then indexes them. Waits up to `patience` seconds for room.

        Raises StoreError; then nothing of the batch is kept.
        """
        self.require_open()
        until = time.monotonic() + patience
        while True:
            if not await self.back_pressure.room(batch.size, until - time.monotonic()):
                raise StoreFull(CROWDED)
            self.back_pressure.took(batch.size)  # before other callers check for room
            try:
                return await self._unfinished.run(self._add(batch))
            except StoreBusy:  # commits took the room
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(LOOK_SECONDS)

    async def _add(self, batch: ResponseBatch) -> None:
        namespace = batch.problem.namespace
        life = self._gaps.life(namespace)
        try:
            self.want(batch.problem)
            with self._read_through.paused(batch.problem):  # otherwise a read could index the batch a second time
                await self._append(batch)
                self.epochs.saw(batch)
                try:
                    await self._indexing.add(batch)
                except BaseException:
                    self._gaps.add(namespace)
                    self._gaps.add_part(batch.problem)
                    raise
                self._gaps.stored(batch.problem, life)
        finally:
            self.back_pressure.indexed(batch.size)

    def want(self, problem: Problem) -> None:
        """Starts to read the problem into the index if the index lacks it. Never waits."""
        if not self._open:
            if len(self._wanted) < WAITING:
                self._wanted.add(problem)
            return
        if self._gaps.possible(problem):
            self._read_through.want(problem)

    def require_open(self) -> None:
        """Raises StoreOpening if the store is not open."""
        if not self._open:
            raise StoreOpening(self.opening)

    def life(self, namespace: str) -> object:
        """Returns the `life` for `store`; ask before the index receives a response."""
        return self._gaps.life(namespace)

    async def store(self, batch: ResponseBatch, life: object) -> None:
        """Stores responses that the index received after `life` was asked for. Raises StoreError."""
        self.require_open()
        await self._append(batch)
        self._gaps.stored(batch.problem, life)

    async def _append(self, batch: ResponseBatch) -> None:
        await self._read_through.settled(batch.problem)
        with self.counts.store_request():
            await asyncio.wrap_future(self._store.append(batch))
        self.counts.stored_responses += len(batch.records)
        self.counts.stored_tokens += batch.tokens
        self._stored_lines.add(batch)

    async def get(self, problem: Problem, limit: int, room: int) -> list[Record]:
        """Returns the stored responses, oldest first. Raises StoreError, and LimitExceeded beyond `room` bytes."""
        self.require_open()
        with self.counts.store_request():
            return await asyncio.to_thread(self._store.history, problem, limit, room)

    async def read(self, work: Callable[[Reader], T]) -> T:
        """Runs `work` on the store in a thread. Returns its result. Keeps the store open. Raises StoreError."""
        return await self.finish(asyncio.to_thread(work, self._store))

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work and returns its result. If the caller is cancelled, work and store go on until it ends."""
        return await self._unfinished.run(work)

    async def learn(self, namespace: str, state: bytes) -> bool:
        """Adopts an estimator from another server. Returns False if the namespace has already learned here."""
        return await self._learning.take(namespace, state)

    @property
    def shared(self) -> bool:
        """Whether other shards use the same store."""
        return not self._store.whole_at_start

    async def drop(self, namespace: str) -> int:
        """Drops a namespace from the store and the index. Returns how many responses were stored."""
        self.require_open()
        return await self._unfinished.run(self._drop(namespace))

    async def _drop(self, namespace: str) -> int:
        async with self._forgetting(namespace):
            with self.counts.store_request():
                dropped = await asyncio.wrap_future(self._store.drop(namespace))
            self.epochs.forget(namespace)
            async with self._read_through.still():
                await self._indexing.drop(namespace)
        self.namespaces.forget(namespace)
        return dropped

    async def rewind(self, namespace: str, epoch: int) -> int:
        """Deletes responses of newer epochs, and returns how many. The index rereads the rest on demand."""
        self.require_open()
        return await self._unfinished.run(self._rewind(namespace, epoch))

    async def _rewind(self, namespace: str, epoch: int) -> int:
        async with self._forgetting(namespace):
            with self.counts.store_request():
                forgotten = await asyncio.wrap_future(self._store.rewind(namespace, epoch))
            self.epochs.rewind(namespace, epoch)
            async with self._read_through.still():
                await self._indexing.drop(namespace, keep_learned=True)
        self._gaps.add(namespace)  # the older epochs, which the index no longer has
        return forgotten

    async def _replaced(self, namespace: str, dropped: bool, newest: int) -> None:
        """Forgets a namespace that another shard dropped or rewound to `newest`, or that the store lost."""
        await self._unfinished.run(self._forget(namespace, dropped, newest))

    async def _forget(self, namespace: str, dropped: bool, newest: int) -> None:
        what = "dropped by another shard" if dropped else "rewound by another shard, or lost by the store"
        log.warning("the index forgets a namespace, whose contents were replaced", namespace=namespace, reason=what)
        async with self._forgetting(namespace):
            if dropped:
                self.epochs.forget(namespace)
            else:
                self.epochs.rewind(namespace, newest)
            async with self._read_through.still():
                await self._indexing.drop(namespace, keep_learned=not dropped)
        self._gaps.add(namespace)
        if dropped:
            self.namespaces.forget(namespace)

    @asynccontextmanager
    async def _forgetting(self, namespace: str) -> AsyncIterator[None]:
        async with self._learning.forgetting(namespace):
            with self._gaps.forgetting(namespace):
                yield

    async def close(self) -> None:
        """Finishes pending work, stops loading, saves the estimators and closes the store."""
        await self.loading.close()
        await self._epoch_watch.stop()
        await self._unfinished.wait()
        await self._read_through.close()
        try:
            if self._open:  # otherwise the new estimators would replace the saved ones
                await self._learning.close()
        finally:
            await asyncio.to_thread(self._close)
            self._stored_lines.flush()

    def _close(self) -> None:
        self._indexing.close()
        self._epoch_watch.close()
        self._store.close()
