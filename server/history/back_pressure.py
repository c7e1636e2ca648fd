"""Makes callers wait while responses arrive faster than the store and the index can take them."""

import asyncio
import time

from histospec.native import Engine
from histospec.server.stores.interface import Store

LOOK_SECONDS = 0.005  # between two checks whether there is room again
LONGEST_WAIT = 10.0  # seconds; then the caller must retry later
CROWDED = "store: responses keep arriving faster than the store and the index can take them; try later"
UNINDEXED = 128 << 20  # bytes of ingests that may wait for the store and the index


class BackPressure:
    """Decides how much may wait for the store and the index, and for how long. Used only on the event loop."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store
        self._unindexed = 0

    async def room(self, size: int = 0, patience: float = LONGEST_WAIT) -> bool:
        """Waits until the index has room, and the queue of the store for `size` bytes; False after `patience` seconds.

        A size of 0 does not wait for the store, whose refusal the caller handles.
        """
        until = time.monotonic() + patience
        while self._engine.congested() or self._unindexed > UNINDEXED or not self._queue_has(size):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    def _queue_has(self, size: int) -> bool:
        """Returns whether the store will queue `size` bytes after the ingests that have not reached its queue yet.

        Those that have reached it count twice. So ingests leave a part of the queue to commits.
        """
        waiting = self._store.waiting_bytes + self._unindexed
        return not size or not waiting or waiting + size <= self._store.waiting_limit

    def took(self, size: int) -> None:
        """Counts an ingest of `size` bytes that starts to wait for the store and the index."""
        self._unindexed += size

    def indexed(self, size: int) -> None:
        """Uncounts an ingest that was indexed or failed."""
        self._unindexed -= size
