"""Adds exported responses that the store lacks, each with its own epoch."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from histospec.server.history.history import History
from histospec.server.stores.interface import Problem, Reader, Record, ResponseBatch, by_epoch
from histospec.server.stores.records import lacking


class Imported(NamedTuple):
    """The result of an import."""

    responses: int
    tokens: int
    learned: bool
    """Whether the namespace adopted the given estimator."""


class Importing:
    """Used only on the event loop. Runs one import at a time, because each must see what the one before it stored."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._lock = asyncio.Lock()

    async def add(
        self, namespace: str, problems: Sequence[tuple[Problem, list[Record]]], estimator: bytes = b""
    ) -> Imported:
        """Adds the responses that the store lacks. A repeated call adds nothing, even after a cancelled one.

        Raises LimitExceeded or InvalidRequest if the namespace cannot be created, and StoreError, after which some of
        the responses may be stored.
        """
        self._history.require_open()
        self._history.namespaces.admit(namespace)
        return await self._history.finish(self._add(namespace, problems, estimator))

    async def _add(
        self, namespace: str, problems: Sequence[tuple[Problem, list[Record]]], estimator: bytes
    ) -> Imported:
        async with self._lock:
            learned = bool(estimator) and await self._history.learn(namespace, estimator)
            batches = await self._history.read(lambda store: _lacking(store, problems))
            results = await asyncio.gather(*map(self._history.add, batches), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result
        return Imported(sum(len(batch.records) for batch in batches), sum(batch.tokens for batch in batches), learned)


def _lacking(store: Reader, problems: Sequence[tuple[Problem, list[Record]]]) -> list[ResponseBatch]:
    """Returns the missing responses, in batches of one problem and one epoch."""
    return [
        batch
        for problem, records in problems
        for batch in by_epoch(
            problem, sorted(lacking(records, store.history(problem)), key=lambda record: record.epoch)
        )
    ]
