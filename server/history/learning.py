"""Keeps what the drafter has learned: restored at the start, saved about once a minute and at the end.

It is worth keeping and can be learned again: nothing waits for it, and whatever fails costs only the saving.
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

# What a crash may cost. A state is 130 KB and is written only if it changed.
SAVE_SECONDS = 60.0


class Learning:
    """The estimators of all namespaces of this shard, and their copies in the store."""

    def __init__(self, engine: Engine, store: Store, counts: Counts) -> None:
        self._engine = engine
        self._store = store
        self._counts = counts
        self._saved: dict[str, int] = {}  # hashes of the states that the store has
        # Held while states go to the store, so that none of a namespace that is being dropped goes there after it.
        self._lock = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None

    def restore(self) -> None:
        """Goes on from what was saved; must come before the first step. Blocks.

        A state that cannot be used, of another version or damaged, is left aside: its namespace starts anew.
        """
        try:
            states = self._store.estimators()
        except StoreError as error:
            self._counts.store_errors += 1
            log.warning("what was learned cannot be read; drafting starts anew", reason=str(error))
            return
        reasons = {namespace: self._restore(namespace, state) for namespace, state in states.items()}
        unusable = {namespace: reason for namespace, reason in reasons.items() if reason}
        if unusable:  # one line for all: after an upgrade that may be every namespace there is
            namespace, reason = next(iter(unusable.items()))
            log.warning(
                "what was learned cannot be used; drafting starts anew",
                namespaces=len(unusable),
                example=namespace,
                reason=reason,
            )

    def _restore(self, namespace: str, state: bytes) -> str:
        """Why the state cannot be used; empty where it is."""
        try:
            self._engine.restore_estimator(namespace, state)
        except ValueError as error:
            return str(error)
        self._saved[namespace] = hash(state)
        return ""

    def start(self) -> None:
        """Begins to save now and then."""
        self._saving = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Saves every estimator that has changed, one after the other, so that little waits for the disk."""
        async with self._lock:
            for namespace in self._engine.counters()[0]:
                await asyncio.sleep(0)  # lets the steps of running sessions through
                state = self._engine.estimator_state(namespace)
                if not state or hash(state) == self._saved.get(namespace):
                    continue
                try:
                    await asyncio.wrap_future(self._store.save_estimator(namespace, state))
                except StoreError as error:  # the others would fare no better; the next time takes them all
                    self._counts.store_errors += 1
                    log.warning("what was learned is not saved", namespace=namespace, reason=str(error))
                    return
                self._saved[namespace] = hash(state)

    async def take(self, namespace: str, state: bytes) -> bool:
        """Goes on from a state of elsewhere, and saves it, unless the namespace has learned something here.

        False where it has, or where the state cannot be used. Raises StoreError: it is used, and not saved.
        """
        async with self._lock:
            if self._engine.estimator_state(namespace):
                return False
            if reason := self._restore(namespace, state):
                log.warning("what was learned cannot be used; drafting starts anew", namespace=namespace, reason=reason)
                return False
            del self._saved[namespace]  # until the store has it
            await asyncio.wrap_future(self._store.save_estimator(namespace, state))
            self._saved[namespace] = hash(state)
            return True

    @asynccontextmanager
    async def forgetting(self, namespace: str) -> AsyncIterator[None]:
        """Nothing is saved while the store and the engine forget a namespace."""
        async with self._lock:
            yield
            self._saved.pop(namespace, None)

    async def close(self) -> None:
        """Saves what was learned since the last time."""
        if self._saving is not None:
            self._saving.cancel()
            with suppress(asyncio.CancelledError):
                await self._saving
        await self.save()
