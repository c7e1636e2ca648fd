"""Keeps the store and the index consistent: the index has what the store has, also after a restart."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import structlog

from histospec.native import Engine
from histospec.protocol.aborted import AbortedResponses
from histospec.server.errors import StoreBusy, StoreFull, StoreOpening
from histospec.server.history.counts import Counts
from histospec.server.history.indexing import Indexing
from histospec.server.history.learning import Learning
from histospec.server.history.loading import Loading
from histospec.server.history.missing import Missing
from histospec.server.history.namespaces import WATCH_SECONDS, Epochs, Namespaces
from histospec.server.history.tenants import NOBODY, Reservation, Tenants
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Problem, Reader, Record, ResponseBatch, Store, by_epoch
from histospec.server.stores.records import lacking
from histospec.server.threads import Threads

log = structlog.get_logger()
T = TypeVar("T")

CHECK_SECONDS = 0.005  # between two checks whether there is room again
LONGEST_WAIT = 10.0  # seconds that a caller waits for room; then it must retry later
MAX_UNINDEXED = 128 << 20  # bytes of ingests that may wait for the store and the index
CROWDED = "store: responses keep arriving faster than the store and the index can take them; try later"
THROTTLE = Throttle(lines=200)


class Imported(NamedTuple):
    """The result of an import."""

    responses: int
    tokens: int
    too_old: int
    """Responses that the store lacked and does not keep, because they are too old."""
    learned: bool
    """Whether the namespace adopted the given estimator."""


class ShieldedTasks:
    """Finishes work even if its caller leaves: otherwise the index could lack responses that the store has."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work and returns its result. If the caller is cancelled, the work goes on."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: the caller may have left, and asyncio would log it

    async def wait(self) -> None:
        """Waits until all work has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


class History:
    """The finished responses of all problems of this shard. Used only on the event loop.

    Decides when the store and the index receive each response. An ingest waits for room, is stored, and then indexed. A
    commit is in the index first, because sessions draft from it at once; then it is stored in the same way.

    Args:
        engine: the index.
        store: may still be opening; see `open`.
        max_namespaces: how many namespaces callers may create.
        tenants: how much each caller may use.
        watch_seconds: time between two checks for epochs of other shards.

    """

    def __init__(
        self, engine: Engine, store: Store, max_namespaces: int, tenants: Tenants, watch_seconds: float = WATCH_SECONDS
    ) -> None:
        self.counts = Counts()
        self.threads = Threads()
        """For the work of callers."""
        self.epochs = Epochs(store, watch_seconds, self._follow)
        self.tenants = tenants
        self.namespaces = Namespaces(max_namespaces, tenants)
        # By namespace and problem id.
        self.aborted = AbortedResponses[tuple[str, str]](tenant=lambda problem: self.namespaces.tenant(problem[0]))
        self._engine = engine
        self._store = store
        self._indexing = Indexing(engine)
        self.missing = Missing(store, self._indexing, self.counts)
        self.learning = Learning(engine, store, self.counts)
        self.loading = Loading(store, self.missing, self.counts, self._indexing.share)
        self._tasks = ShieldedTasks()
        self._importing = asyncio.Lock()  # each import must see what the one before it stored
        self._unindexed = 0  # bytes of ingests that wait for the store and the index
        self._open = False
        self._measuring: asyncio.Task[None] | None = None

    # Lifecycle

    @property
    def opening(self) -> str:
        """Why nothing can be stored yet, as a sentence for callers; empty if the store is open."""
        if self._open:
            return ""
        return f"store: it is not open yet ({self._store.opening or 'its namespaces are being read'}); try later"

    def require_open(self) -> None:
        """Raises StoreOpening if the store is not open."""
        if not self._open:
            raise StoreOpening(self.opening)

    @property
    def trouble(self) -> str:
        """Why nothing can be stored until a person acts; empty if it can."""
        return self._store.trouble

    @property
    def waiting_bytes(self) -> int:
        """The size of the responses that wait for the store or the index; some count twice."""
        return self._store.waiting_bytes + self._unindexed

    @property
    def shared(self) -> bool:
        """Whether other shards use the same store."""
        return not self._store.whole_at_start

    async def open(self, newest: dict[str, int]) -> None:
        """Starts to use the open store. `newest` holds its namespaces and their newest epochs."""
        self.epochs.open(newest)
        self.namespaces.know(newest)
        await asyncio.to_thread(self.learning.restore)
        self._open = True
        self.missing.open()

    async def load(self) -> None:
        """Starts to index the contents of the store, and to save estimators.

        The history is ready for callers: it reads a problem from the store on demand.

        Raises StoreError if the store is not open and cannot be read.
        """
        if not self._open:
            await self.open(await asyncio.to_thread(self._store.newest_epochs))
        self.learning.start()
        self._measuring = asyncio.ensure_future(
            self.tenants.measure(lambda: self.read(lambda store: store.sizes()), self.namespaces.tenant)
        )
        self.epochs.watch()
        self.loading.start()

    async def close(self) -> None:
        """Finishes pending work, stops loading, saves the estimators and closes the store."""
        if self._measuring is not None:
            self._measuring.cancel()
        await self.loading.close()
        await self.epochs.close()
        await self._tasks.wait()
        await self.missing.close()
        try:
            if self._open:  # otherwise the new estimators would replace the saved ones
                await self.learning.close()
        finally:
            await asyncio.to_thread(self._indexing.close)
            await asyncio.to_thread(self._store.close)
            self.threads.close()
            self.counts.log_stored()

    # New responses

    async def add(
        self,
        batch: ResponseBatch,
        source: str = "",
        explicit_epoch: bool = False,
        patience: float = LONGEST_WAIT,
        creator: str = NOBODY,
    ) -> ResponseBatch:
        """Stores responses, then indexes them. Waits up to `patience` seconds for room.

        Returns those that the store keeps, because they are not too old. Raises LimitExceeded if they need one
        namespace too many, InvalidRequest if their namespace cannot have that name or their explicit epoch is too far
        ahead, and StoreError. In each case, nothing of the batch is kept.

        Args:
            batch: the responses.
            source: the caller, for the log; if empty, the batch is not logged.
            explicit_epoch: the caller gave the epoch: see `Epochs.saw`.
            patience: seconds.
            creator: the name of the caller's token, which creates a new namespace.
        """
        started = time.monotonic()
        self.require_open()
        namespace = batch.problem.namespace
        kept = batch
        if batch.records:
            if explicit_epoch:
                self.epochs.check("epoch", namespace, batch.records[0].epoch)
            self.namespaces.admit(namespace, creator)
            kept = await self._add(batch, explicit_epoch, started + patience)
        if source and (more := THROTTLE.admits("ingested")) is not None:
            log.info(
                "ingested",
                peer=source,
                namespace=namespace,
                epoch=batch.records[0].epoch if batch.records else None,
                responses=len(batch.records),
                tokens=batch.tokens,
                seconds=round(time.monotonic() - started, 3),
                **more,
            )
        return kept

    async def _add(self, batch: ResponseBatch, explicit_epoch: bool, until: float) -> ResponseBatch:
        while True:
            if not await self._room(until, batch.waiting_size):
                raise StoreFull(CROWDED)
            if refusal := self.store_refusal(batch.problem.namespace, batch.size):
                raise StoreFull(f"{refusal}; the request is refused")
            reservation = self.tenants.reserve(self.namespaces.tenant(batch.problem.namespace), batch.size)
            self._unindexed += batch.size  # before other callers check for room
            try:
                return await self._tasks.run(self._store_and_index(batch, explicit_epoch, reservation))
            except StoreBusy:  # commits took the room
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(CHECK_SECONDS)

    async def _room(self, until: float, size: int = 0) -> bool:
        """Waits until the index has room, and the queue of the store for `size` bytes. Returns False if it does not.

        A size of 0 does not wait for the store, whose refusal the caller handles.
        """
        while self._engine.congested() or self._unindexed > MAX_UNINDEXED or not self._queue_has(size):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(CHECK_SECONDS)
        return True

    def _queue_has(self, size: int) -> bool:
        """Returns whether the store will queue `size` bytes after the ingests that have not reached its queue yet.

        Those that have reached it count twice. So ingests leave a part of the queue to commits.
        """
        waiting = self.waiting_bytes
        return not size or not waiting or waiting + size <= self._store.waiting_limit

    async def _store_and_index(
        self, batch: ResponseBatch, explicit_epoch: bool, reservation: Reservation
    ) -> ResponseBatch:
        try:
            async with self.missing.storing(batch.problem, self.missing.want(batch.problem)):
                kept = await self._append(batch, reservation)
                self.epochs.saw(batch, explicit_epoch)
                try:
                    await self._indexing.add(batch)
                except BaseException:
                    self.missing.add(batch.problem)
                    raise
            return kept
        finally:
            self._unindexed -= batch.size
            reservation.settle()

    async def _append(self, batch: ResponseBatch, reservation: Reservation) -> ResponseBatch:
        with self.counts.store_request():
            too_old = await asyncio.wrap_future(self._store.append(batch))
        kept = batch._replace(records=batch.records[too_old:])  # they have one epoch, so the first ones are the oldest
        self.counts.stored(kept)
        reservation.settle(kept.size if kept.records else 0)
        if too_old:
            namespace = batch.problem.namespace
            self.counts.refused_as_old(too_old, namespace, batch.records[0].epoch, self.epochs.newest(namespace))
        return kept

    def store_refusal(self, namespace: str, size: int) -> str:
        """Returns why the tenant of a namespace may not store `size` bytes more; empty if it may."""
        if not self.tenants.known or self._store.opening:
            return ""
        return self.tenants.store_refusal(self.namespaces.tenant(namespace), size, self._store.size)

    async def refuses_commits(self) -> str:
        """Waits until the index has room. Returns why nothing can be committed now; empty if it can."""
        return self.opening or ("" if await self._room(time.monotonic() + LONGEST_WAIT) else CROWDED)

    async def commit(self, batch: ResponseBatch, generation: int, reservation: Reservation) -> ResponseBatch:
        """Stores responses that the index received after `missing.want` returned the generation. Raises StoreError.

        Returns those that the store keeps, because they are not too old. Settles the reservation.
        """
        with reservation:
            self.require_open()
            async with self.missing.storing(batch.problem, generation):
                return await self._append(batch, reservation)

    async def import_lacking(
        self,
        namespace: str,
        problems: Sequence[tuple[Problem, list[Record]]],
        estimator: bytes = b"",
        creator: str = NOBODY,
    ) -> Imported:
        """Adds the responses that the store lacks, each with its own epoch, and an estimator if none has learned here.

        A repeated call adds nothing, even after a cancelled one.

        Raises LimitExceeded or InvalidRequest if the namespace cannot be created, InvalidRequest if an epoch is too far
        ahead, and StoreError, after which some of the responses may be stored.
        """
        self.require_open()
        self.epochs.check_import(namespace, problems)
        self.namespaces.admit(namespace, creator)
        return await self._tasks.run(self._import(namespace, problems, estimator))

    async def _import(
        self, namespace: str, problems: Sequence[tuple[Problem, list[Record]]], estimator: bytes
    ) -> Imported:
        async with self._importing:
            learned = bool(estimator) and await self.learning.take(namespace, estimator)
            batches = await self.threads.run("import", self._lacking, problems)
            results = await asyncio.gather(*map(self.add, batches), return_exceptions=True)
            self.epochs.caught_up(namespace)
        kept: list[ResponseBatch] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            kept.append(result)
        responses = sum(len(batch.records) for batch in kept)
        too_old = sum(len(batch.records) for batch in batches) - responses
        return Imported(responses, sum(batch.tokens for batch in kept), too_old, learned)

    def _lacking(self, problems: Sequence[tuple[Problem, list[Record]]]) -> list[ResponseBatch]:
        """Returns the responses that the store lacks, in batches of one problem and one epoch."""
        return [
            batch
            for problem, records in problems
            for batch in by_epoch(
                problem, sorted(lacking(records, self._store.history(problem)), key=lambda record: record.epoch)
            )
        ]

    # Reads

    async def get(self, problem: Problem, limit: int, room: int, encode: Callable[[list[Record]], T]) -> T:
        """Returns `encode` of the stored responses, oldest first.

        Raises StoreError, and LimitExceeded beyond `room` bytes.
        """
        self.require_open()
        with self.counts.store_request():
            return await self.threads.run("history", lambda: encode(self._store.history(problem, limit, room)))

    async def read(self, work: Callable[[Reader], T]) -> T:
        """Runs `work` on the store in a thread. Returns its result. Keeps the store open. Raises StoreError."""
        return await self._tasks.run(self.threads.run("export", work, self._store))

    # Drops and rewinds

    async def drop(self, namespace: str) -> int:
        """Drops a namespace from the store and the index. Returns how many responses were stored."""
        self.require_open()
        return await self._tasks.run(self._forget(namespace, None))

    async def rewind(self, namespace: str, epoch: int) -> int:
        """Deletes responses of newer epochs, and returns how many. The index rereads the rest on demand."""
        self.require_open()
        return await self._tasks.run(self._forget(namespace, epoch))

    async def _follow(self, namespace: str, epoch: int | None) -> None:
        """Forgets a namespace that another shard dropped (None) or rewound, or that the store lost."""
        what = "another shard dropped it" if epoch is None else "another shard rewound it, or the store lost it"
        log.warning("the index forgets a namespace", namespace=namespace, reason=what)
        await self._tasks.run(self._forget(namespace, epoch, in_store=False))

    async def _forget(self, namespace: str, epoch: int | None, in_store: bool = True) -> int:
        rewinds = epoch is not None
        deleted = 0
        self.aborted.forget(lambda problem: problem[0] == namespace)
        async with self.learning.forgetting(namespace):
            with self.missing.forgetting(namespace, keeps=rewinds or not in_store):
                if in_store:
                    with self.counts.store_request():
                        drop, rewind = self._store.drop, self._store.rewind
                        deleting = drop(namespace) if epoch is None else rewind(namespace, epoch)
                        deleted = await asyncio.wrap_future(deleting)
                self.epochs.set_back(namespace, epoch)
                async with self.missing.still():
                    await self._indexing.drop(namespace, keep_learned=rewinds)
        if not rewinds:
            self.namespaces.forget(namespace)
        return deleted
