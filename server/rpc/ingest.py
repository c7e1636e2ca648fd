"""Adds whole finished responses to the history, for every protocol that brings them."""

import time

import structlog

from histospec.server.history.back_pressure import LONGEST_WAIT
from histospec.server.history.history import History
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import ResponseBatch

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)


async def ingest(
    history: History, batch: ResponseBatch, peer: str, explicit_epoch: bool = False, patience: float = LONGEST_WAIT
) -> None:
    """Stores and indexes a batch, and logs it. Waits up to `patience` seconds for room.

    If its epoch is explicit, weight-change counts no longer advance the namespace.

    Raises LimitExceeded if it needs one namespace too many, InvalidRequest if its namespace cannot have that name, and
    StoreError. In each case, nothing of the batch is kept.
    """
    started = time.perf_counter()
    history.require_open()
    if batch.records:
        history.namespaces.admit(batch.problem.namespace)
        if explicit_epoch:
            history.epochs.give(batch.problem.namespace)
        await history.add(batch, patience)
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
