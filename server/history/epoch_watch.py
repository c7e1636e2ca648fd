"""Learns the newest epochs that other shards have written to a shared store."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog

from histospec.server.errors import StoreError
from histospec.server.history.epochs import Epochs
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Store

log = structlog.get_logger()

WATCH_SECONDS = 3.0  # between two checks


class EpochWatch:
    """Watches the store, and raises `epochs` to what it finds. Used only on the event loop."""

    def __init__(self, store: Store, epochs: Epochs) -> None:
        self._store = store
        self._epochs = epochs
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to check every few seconds, if other shards share the store."""
        if not self._store.whole_at_start:
            self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        throttle = Throttle(1, 60.0)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._look()
            except StoreError as error:
                if (left_out := throttle.admits("failed")) is not None:
                    log.warning("the newest epochs of other shards are not known", reason=str(error), **left_out)

    async def _look(self) -> None:
        before = self._epochs.setbacks
        newest = await asyncio.get_running_loop().run_in_executor(self._reader, self._store.newest_epochs)
        self._epochs.merge(newest, before)

    async def stop(self) -> None:
        """Stops checking. A running check may still block its thread, see `close`."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def close(self) -> None:
        """Blocks until no check reads the store."""
        self._reader.shutdown()
