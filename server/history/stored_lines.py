"""Logs one line for everything that is stored within a few seconds."""

import asyncio
from collections import Counter
from contextvars import Context

import structlog

from histospec.server.stores.interface import ResponseBatch

log = structlog.get_logger()

LOG_SECONDS = 5.0


class StoredLines:
    """Sums up stored batches until the next line. Lives on the event loop."""

    def __init__(self) -> None:
        self._sum: Counter[str] = Counter()

    def add(self, batch: ResponseBatch) -> None:
        """A batch is stored."""
        if not self._sum:
            no_request = Context()  # else the line would name the request that happened to come first
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.flush, context=no_request)
        self._sum.update(responses=len(batch.records), tokens=batch.tokens, batches=1)

    def flush(self) -> None:
        """Logs what was stored since the last line."""
        if self._sum:
            log.info("stored", **self._sum)
            self._sum.clear()
