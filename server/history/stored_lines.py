"""Logs one line for all responses stored within a few seconds."""

import asyncio
from collections import Counter
from contextvars import Context

import structlog

from histospec.server.stores.interface import ResponseBatch

log = structlog.get_logger()

LOG_SECONDS = 5.0


class StoredLines:
    """Sums up stored batches until the next line. Used only on the event loop."""

    def __init__(self) -> None:
        self._sum: Counter[str] = Counter()

    def add(self, batch: ResponseBatch) -> None:
        """Adds a stored batch."""
        if not self._sum:
            no_request = Context()  # otherwise the line would have the ID of an arbitrary request
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.flush, context=no_request)
        self._sum.update(responses=len(batch.records), tokens=batch.tokens, batches=1)

    def flush(self) -> None:
        """Logs a line about the batches since the last one."""
        if self._sum:
            log.info("stored", **self._sum)
            self._sum.clear()
