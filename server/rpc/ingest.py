"""How finished responses that come in one piece get into the history, whichever protocol brings them."""

import time

import structlog

from histospec.protocol.arrays import INT32
from histospec.server.history.history import History
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Batch

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)


async def ingest(history: History, batch: Batch, peer: str) -> int:
    """Stores and indexes a batch, and says so in the log; returns how many tokens it has.

    Raises LimitExceeded where it would be one namespace too many, and StoreError; then nothing of it is kept.
    """
    started = time.perf_counter()
    if batch.records:
        history.admit(batch.problem.namespace)
        await history.add(batch)
    tokens = sum(len(record.tokens) for record in batch.records) // INT32.itemsize
    if (more := THROTTLE.admits("ingested")) is not None:
        log.info(
            "ingested",
            peer=peer,
            namespace=batch.problem.namespace,
            epoch=batch.records[0].epoch if batch.records else None,
            responses=len(batch.records),
            tokens=tokens,
            seconds=round(time.perf_counter() - started, 3),
            **more,
        )
    return tokens
