"""Learns what other shards do to a shared store: the newest epochs that they write, their drops and rewinds."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from histospec.server.errors import StoreError
from histospec.server.history.epochs import Epochs
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Store

log = structlog.get_logger()

WATCH_SECONDS = 3.0  # between two checks


class EpochWatch:
    """Watches the store, and raises `epochs` to what it finds. Used only on the event loop.

    Args:
        store: asked every few seconds.
        epochs: receives the newest epochs.
        replaced: awaited for each namespace whose contents in the store are no longer those that this server has
            indexed; receives whether it was dropped, and its newest epoch now.

    """

    def __init__(
        self, store: Store, epochs: Epochs, replaced: Callable[[str, bool, int], Coroutine[Any, Any, None]]
    ) -> None:
        self._store = store
        self._epochs = epochs
        self._replaced = replaced
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
        read = partial(asyncio.get_running_loop().run_in_executor, self._reader)
        replaced = await read(self._store.replaced)
        newest = await read(self._store.newest_epochs)
        for namespace, dropped in replaced.items():
            await self._replaced(namespace, dropped, newest.get(namespace, 0))
        self._epochs.merge(newest, before + len(replaced))  # each of them is a setback

    async def stop(self) -> None:
        """Stops checking. A running check may still block its thread, see `close`."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def close(self) -> None:
        """Blocks until no check reads the store."""
        self._reader.shutdown()
