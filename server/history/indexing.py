"""Puts stored responses into the engine's index."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from histospec.native import Engine
from histospec.protocol.arrays import INT32
from histospec.server.stores.interface import Problem, Record, ResponseBatch

INDEX_TOKENS = 1 << 20  # of one call: building takes 48 bytes a token meanwhile


class Indexing:
    """Knows what the engine takes. Building takes milliseconds, so one thread does it and the event loop goes on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")

    def holds(self, problem: Problem) -> bool:
        """Whether the index has finished responses of the problem."""
        prompt = np.frombuffer(problem.prompt, INT32)
        return self._engine.knows(problem.namespace, prompt, problem=problem.name or None)

    async def add(self, batches: Iterable[ResponseBatch]) -> None:
        """Indexes batches in the indexing thread, in the order of the calls."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._build_all, batches)

    def _build_all(self, batches: Iterable[ResponseBatch]) -> None:
        for batch in batches:
            self.build(batch)

    def build(self, batch: ResponseBatch) -> None:
        """Indexes a batch in the caller's thread, in pieces of INDEX_TOKENS."""
        some: list[Record] = []
        size = 0
        for record in batch.records:
            if some and size + len(record.tokens) > INDEX_TOKENS * INT32.itemsize:
                self._ingest(batch.problem, some)
                some, size = [], 0
            some.append(record)
            size += len(record.tokens)
        self._ingest(batch.problem, some)

    def _ingest(self, problem: Problem, records: list[Record]) -> None:
        masks = [np.frombuffer(r.generated, np.uint8) if r.generated else None for r in records]
        self._engine.ingest(
            problem.namespace,
            np.frombuffer(problem.prompt, INT32),
            [np.frombuffer(record.tokens, INT32) for record in records],
            epoch=records[0].epoch,
            rewards=[record.reward for record in records],
            problem=problem.name or None,
            generated=masks,
            seeds=[record.seed for record in records],
        )

    async def drop(self, namespace: str, *, keep_learned: bool = False) -> None:
        """Drops a namespace after everything that `add` was asked for before."""
        drop = self._engine.drop_namespace
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: drop(namespace, keep_learned=keep_learned))

    def close(self) -> None:
        """Blocks until everything asked for is indexed."""
        self._thread.shutdown()
