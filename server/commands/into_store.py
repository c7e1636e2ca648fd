"""Writes problems to a store that this process has opened."""

from collections import deque
from concurrent.futures import Future

from histospec.server.commands.lines import Stored
from histospec.server.stores.interface import ResponseBatch, Store, by_epoch, total_size
from histospec.server.stores.records import lacking

# Limits of the data on its way to the store.
BATCHES = 64
BYTES = 32 << 20


class IntoStore:
    """Problems on their way to a store: several at a time, to share round trips, but no more than fit in memory.

    Adds only missing responses to namespaces in `held`. Methods raise StoreError.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self.held = set(store.newest_epochs())
        self.responses = self.tokens = 0

    def add(self, stored: Stored) -> None:
        """Sends a problem. Waits for earlier ones if there are too many."""
        problem, records, learned = stored
        if problem.namespace in self.held:
            records = lacking(records, self._store.history(problem))
        for batch in by_epoch(problem, records):
            self._send(batch)
        if learned and self._store.estimator(problem.namespace) is None:
            self.land()
            self._store.save_estimator(problem.namespace, learned).result()

    def land(self) -> None:
        """Waits until everything is stored."""
        self._settle(0, 0)

    def _send(self, batch: ResponseBatch) -> None:
        size = total_size(batch.records)
        self._settle(BATCHES - 1, BYTES - size)
        self._waiting.append((self._store.append(batch), size))
        self.responses += len(batch.records)
        self.tokens += batch.tokens

    def _settle(self, batches: int, size: int) -> None:
        """Waits until at most this many batches and bytes are left."""
        while self._waiting and (len(self._waiting) > batches or sum(s for _, s in self._waiting) > size):
            self._waiting.popleft()[0].result()
