"""Reads the store into the index in the background after the start, the most relevant problems first.

The server is ready earlier: a problem that a session needs is read at once. Loading ends when the index is nearly full,
so that it evicts nothing. The rest is read on demand.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog

from histospec.server.errors import StoreError
from histospec.server.history.counts import Counts
from histospec.server.history.missing import Missing, Reading
from histospec.server.machine import cpu_limit
from histospec.server.stores.interface import Problem, Store

log = structlog.get_logger()

LOG_SECONDS = 5.0  # between two log lines about progress
FULL = 0.9  # of the memory budget; the rest is for new responses
# Each thread holds the GIL for about a tenth of its time. All threads have the same priority: one with a lower priority
# would keep the GIL and the engine's lock for as long as other programs keep it from running.
MOST_THREADS = 4
PATIENCE = 1.0  # seconds that loading waits for problems on demand to be read first


def threads() -> int:
    """Returns how many threads load: all CPUs but one, which is left to drafting."""
    return max(1, min(MOST_THREADS, cpu_limit() - 1))


class Loading:
    """Used only on the event loop.

    Args:
        store: loaded only if its `whole_at_start` is true.
        missing: reads the problems that the index lacks.
        counts: records whether loading is running.
        share: returns the share of the memory budget that the index uses.

    """

    def __init__(self, store: Store, missing: Missing, counts: Counts, share: Callable[[], float]) -> None:
        self._store = store
        self._missing = missing
        self._counts = counts
        self._share = share
        self._threads = ThreadPoolExecutor(threads(), thread_name_prefix="load")
        self._paging = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._given_up = self._failed = False
        self._whole = True  # no problem was left out
        self._total = self._responses = self._tokens = 0
        self._started = self._logged = 0.0
        self.done = asyncio.Event()
        """Set when loading has ended."""
        self.ready = False
        """Whether callers are served as well as they will be: problems that are not loaded are read on demand."""
        self.progress = "not started"
        """The progress or the result, in words."""

    def start(self) -> None:
        """Starts to load. The history is ready from now on."""
        self.ready = True
        self.progress = "read when asked for"
        if not self._store.whole_at_start:
            self.done.set()
            return
        self._counts.loading = True
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        stopped = "loading stopped; problems are read when they are asked for"
        try:
            await self._load()
        except Exception as error:
            self.progress = "loading stopped; the rest is read when asked for"
            if isinstance(error, StoreError):
                log.error(stopped, reason=str(error))
            else:
                log.exception(stopped)
        finally:
            self._counts.loading = False
            self.done.set()
        if not self._given_up:
            self._store.look_for_damage()

    async def _load(self) -> None:
        self.progress = "loading"
        self._started = self._logged = time.monotonic()
        run = asyncio.get_running_loop().run_in_executor
        self._total = await run(self._threads, self._store.count)
        pages = self._store.wanted_first()
        for failure in await asyncio.gather(*(self._work(pages) for _ in range(threads())), return_exceptions=True):
            if failure is not None:
                raise failure
        if self._given_up:
            return
        about = {"responses": self._responses, "tokens": self._tokens, "seconds": round(self._seconds(), 3)}
        if self._whole:
            self._missing.loaded()
            self.progress = "loaded"
            log.info("loaded", **about)
        else:
            share = f"{self._responses} of {self._total} responses"
            self.progress = f"loaded {share}, as many as --memory holds; the rest is read when asked for"
            log.info("loaded as much as --memory holds; the rest is read when asked for", of=self._total, **about)

    async def _work(self, pages: Iterator[list[Problem]]) -> None:
        """Loads page after page, in parallel with other calls."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            while self._goes_on():
                async with self._paging:
                    page = await run(self._threads, next, pages, None)
                if page is None:
                    return
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._missing.calm(), PATIENCE)
                self._add(await self._missing.load(page, self._threads, self._goes_on))
        except BaseException:
            self._failed = True
            raise
        self._whole = False

    def _goes_on(self) -> bool:
        return not (self._given_up or self._failed) and self._share() < FULL

    def _add(self, some: Reading) -> None:
        self._responses += some.responses
        self._tokens += some.tokens
        self._whole &= some.whole
        self.progress = f"loading {self._responses} of {self._total} responses"
        if time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            log.info(
                "loading",
                responses=self._responses,
                of=self._total,
                tokens=self._tokens,
                tokens_per_second=round(self._tokens / self._seconds()),
                epoch=some.epoch,
            )

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def give_up(self) -> None:
        """Ends loading after the problems that are being read."""
        self._given_up = True

    async def close(self) -> None:
        """Ends loading and waits until it has stopped."""
        self.give_up()
        if self._task is not None:
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._threads.shutdown)
