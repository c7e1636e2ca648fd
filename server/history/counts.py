"""The counters of a history since the start: metrics read them, and the log sums up what was stored."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field

import structlog

from histospec.server.errors import StoreError
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import ResponseBatch

log = structlog.get_logger()

LOOKUPS = ("hit", "miss", "failed", "skipped")
LOG_SECONDS = 5.0  # one log line for all responses that are stored within this time
THROTTLE = Throttle(lines=1, seconds=60.0)


@dataclass
class Counts:
    """Only one thread writes each number."""

    stored_responses: int = 0
    """Responses ingested or committed that the store keeps."""
    stored_tokens: int = 0
    too_old: int = 0
    """Responses that the store does not keep, because they are older than what it keeps of their problem."""
    latest_too_old: str = ""
    """The epoch and namespace of the latest of these, in words."""
    loaded_responses: int = 0
    """Responses indexed from the store since the start."""
    loading: bool = False
    """Whether the store is being loaded in the background."""
    store_errors: int = 0
    """Requests that failed in the store."""
    lookups: Counter[str] = field(default_factory=Counter)
    """Look-ups in the store for problems missing in the index, by result: one of LOOKUPS."""
    _unlogged: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def store_request(self) -> Iterator[None]:
        """Counts a StoreError that the block raises, and lets it pass."""
        try:
            yield
        except StoreError:
            self.store_errors += 1
            raise

    def stored(self, batch: ResponseBatch) -> None:
        """Counts a stored batch. Used only on the event loop."""
        self.stored_responses += len(batch.records)
        self.stored_tokens += batch.tokens
        if not self._unlogged:
            no_request = Context()  # otherwise the line would have the ID of an arbitrary request
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.log_stored, context=no_request)
        self._unlogged.update(responses=len(batch.records), tokens=batch.tokens, batches=1)

    def refused_as_old(self, number: int, namespace: str, epoch: int, newest_epoch: int) -> None:
        """Counts responses that the store does not keep, and logs them once a minute."""
        self.too_old += number
        self.latest_too_old = f"epoch {epoch} in namespace {namespace}, whose newest epoch is {newest_epoch}"
        if (more := THROTTLE.admits("too old")) is not None:
            log.warning(
                "responses are too old to keep; if their epoch is right, rewind the namespace",
                namespace=namespace,
                epoch=epoch,
                newest_epoch=newest_epoch,
                since_start=self.too_old,
                **more,
            )

    def log_stored(self) -> None:
        """Logs a line about the batches since the last one."""
        if self._unlogged:
            log.info("stored", **self._unlogged)
            self._unlogged.clear()
