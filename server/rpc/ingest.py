"""How finished responses that come in one piece get into the history, whichever protocol brings them."""

import time

import structlog

from histospec.server.history.history import History
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import ResponseBatch

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)


async def ingest(history: History, batch: ResponseBatch, peer: str, explicit_epoch: bool = False) -> None:
    """Stores and indexes a batch, and says so in the log.

    If its epoch is explicit, weight-change counts no longer advance the namespace.

    Raises LimitExceeded where it would be one namespace too many, InvalidRequest where its name cannot be a new one's,
    and StoreError; then nothing of it is kept.
    """
    started = time.perf_counter()
    history.require_open()
    if batch.records:
        history.namespaces.admit(batch.problem.namespace)
        if explicit_epoch:
            history.epochs.give(batch.problem.namespace)
        await history.add(batch)
    if (more := THROTTLE.admits("ingested")) is not None:
        log.info(
            "ingested",
            peer=peer,
            namespace=batch.problem.namespace,
            epoch=batch.records[0].epoch if batch.records else None,
            responses=len(batch.records),
            tokens=batch.tokens,
            seconds=round(time.perf_counter() - started, 3),
            **more,
        )
