"""Indexes what the store holds when the server starts."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import structlog

from histospec.server.history.counts import Counts
from histospec.server.history.indexing import Indexing
from histospec.server.stores.interface import Store

log = structlog.get_logger()

LOG_SECONDS = 5.0  # between two lines about progress


class Loading:
    """Knows how far the loading is; `done` is set when everything is indexed that has to be before the first draft."""

    def __init__(self, store: Store, indexing: Indexing, counts: Counts) -> None:
        self._store = store
        self._indexing = indexing
        self._counts = counts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._given_up = False
        self.done = asyncio.Event()
        self.progress = "not started"

    async def run(self) -> None:
        """Indexes everything in a thread. Raises StoreError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        self.done.set()

    def _load(self) -> None:
        if not self._store.whole_at_start:
            self.progress = "read when asked for"
            return
        started = said = time.monotonic()
        total, responses, tokens = self._store.count(), 0, 0
        for batch in self._store.load():
            if self._given_up:
                return
            self._indexing.build(batch)
            responses += len(batch.records)
            tokens += batch.tokens
            self._counts.loaded_responses = responses
            self.progress = f"loaded {responses} of {total} responses"
            if time.monotonic() - said > LOG_SECONDS:
                said = time.monotonic()
                log.info("loading", responses=responses, of=total, tokens=tokens)
        self.progress = "loaded"
        log.info("loaded", responses=responses, tokens=tokens, seconds=round(time.monotonic() - started, 3))

    def give_up(self) -> None:
        """Ends the loading before the next batch."""
        self._given_up = True

    def close(self) -> None:
        """Blocks until the thread has ended."""
        self._thread.shutdown()
