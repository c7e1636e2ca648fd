"""Saves the estimators about once a minute and at the end, and restores them at the start.

A lost estimator can be learned again: nothing waits for a save, and a failure loses only that save.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history.counts import Counts
from histospec.server.stores.interface import Store

log = structlog.get_logger()

# The learning that a crash may lose, in seconds. A state is 130 KB and is written only if it changed.
SAVE_SECONDS = 60.0


class Learning:
    """The estimators of all namespaces of this shard, and their copies in the store."""

    def __init__(self, engine: Engine, store: Store, counts: Counts) -> None:
        self._engine = engine
        self._store = store
        self._counts = counts
        self._saved: dict[str, int] = {}  # hashes of the states in the store
        # Held during saves, so that no state of a namespace reaches the store after its drop.
        self._lock = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None

    def restore(self) -> None:
        """Restores the saved states. Must run before the first step. Blocks.

        A state that cannot be used (damaged, or of another version) is ignored: its namespace starts from the default.
        """
        try:
            states = self._store.estimators()
        except StoreError as error:
            self._counts.store_errors += 1
            log.warning("saved estimators cannot be read; drafting starts from the defaults", reason=str(error))
            return
        reasons = {namespace: self._restore(namespace, state) for namespace, state in states.items()}
        unusable = {namespace: reason for namespace, reason in reasons.items() if reason}
        if unusable:  # one line for all: after an upgrade these may be all namespaces
            namespace, reason = next(iter(unusable.items()))
            log.warning(
                "saved estimators cannot be used; drafting starts from the defaults",
                namespaces=len(unusable),
                example=namespace,
                reason=reason,
            )

    def _restore(self, namespace: str, state: bytes) -> str:
        """Restores a state. Returns why it cannot be used; empty if it was restored."""
        try:
            self._engine.restore_estimator(namespace, state)
        except ValueError as error:
            return str(error)
        self._saved[namespace] = hash(state)
        return ""

    def start(self) -> None:
        """Starts to save regularly."""
        self._saving = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Saves every changed estimator, one at a time, so that little waits for the disk."""
        async with self._lock:
            for namespace in self._engine.counters()[0]:
                await asyncio.sleep(0)  # lets steps of running sessions run
                state = self._engine.estimator_state(namespace)
                if not state or hash(state) == self._saved.get(namespace):
                    continue
                try:
                    await asyncio.wrap_future(self._store.save_estimator(namespace, state))
                except StoreError as error:  # the others would fail, too; the next save tries all of them again
                    self._counts.store_errors += 1
                    log.warning("estimator not saved", namespace=namespace, reason=str(error))
                    return
                self._saved[namespace] = hash(state)

    async def take(self, namespace: str, state: bytes) -> bool:
        """Adopts a state from another server and saves it, unless the namespace has already learned here.

        Returns False in that case, or if the state cannot be used. Raises StoreError if it is adopted but not saved.
        """
        async with self._lock:
            if self._engine.estimator_state(namespace):
                return False
            if reason := self._restore(namespace, state):
                log.warning("imported estimator cannot be used; drafting goes on", namespace=namespace, reason=reason)
                return False
            del self._saved[namespace]  # until the store has the state
            await asyncio.wrap_future(self._store.save_estimator(namespace, state))
            self._saved[namespace] = hash(state)
            return True

    @asynccontextmanager
    async def forgetting(self, namespace: str) -> AsyncIterator[None]:
        """Prevents saves while the store and the engine forget a namespace."""
        async with self._lock:
            yield
            self._saved.pop(namespace, None)

    async def close(self) -> None:
        """Saves the changes since the last save."""
        if self._saving is not None:
            self._saving.cancel()
            with suppress(asyncio.CancelledError):
                await self._saving
        await self.save()
