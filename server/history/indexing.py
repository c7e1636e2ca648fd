"""Adds stored responses to the engine's index."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from histospec.native import Engine
from histospec.protocol.arrays import INT32
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.records import for_engine, without

# Building takes BUILD_BYTES per token temporarily. A piece may take 1/INDEX_PART of the memory budget, but at least and
# at most INDEX_TOKENS tokens.
INDEX_TOKENS = 1 << 18, 1 << 20
INDEX_PART = 64
BUILD_BYTES = 48

Held = Counter[tuple[bytes, int]]
"""Responses by tokens and epoch, with their number."""


def lacking(held: Held | None, records: list[Record]) -> list[Record]:
    """Returns the stored responses of a problem that the index lacks; removes those that it has from `held`."""
    return without(records, held, lambda record: (record.tokens, record.epoch)) if held else records


class Indexing:
    """Builds in one separate thread, because it takes milliseconds and the event loop must keep running."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        least, most = INDEX_TOKENS
        tokens = min(most, max(least, engine.memory_budget() // INDEX_PART // BUILD_BYTES))
        self._piece_bytes = tokens * INT32.itemsize
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")

    def holds(self, problem: Problem) -> bool:
        """Returns whether the index has finished responses of the problem."""
        prompt = np.frombuffer(problem.prompt, INT32)
        return self._engine.knows(problem.namespace, prompt, problem=problem.name or None)

    def evicted(self) -> bool:
        """Returns whether the index has ever evicted responses."""
        return self._engine.evicted()

    async def add(self, batch: ResponseBatch) -> None:
        """Indexes a new batch in the indexing thread, in the order of calls."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.build, batch.problem, batch.records)

    def restore(self, problem: Problem, records: list[Record], ahead: bool) -> None:
        """Indexes responses, oldest first, that are older than all indexed responses of the problem. Blocks.

        Builds in the indexing thread, in the order of calls. `ahead`: no caller has asked for the problem yet, and the
        caller's thread builds.
        """
        if ahead:
            self.build(problem, records, stored=True, ahead=True)
        else:
            self._thread.submit(self.build, problem, records, stored=True).result()

    def build(self, problem: Problem, records: list[Record], stored: bool = False, ahead: bool = False) -> None:
        """Indexes responses in the caller's thread, in pieces. `stored` and `ahead`: see `Engine.ingest`."""
        pieces: list[list[Record]] = []
        size = self._piece_bytes
        for record in records:
            if size + len(record.tokens) > self._piece_bytes:
                pieces.append([])
                size = 0
            pieces[-1].append(record)
            size += len(record.tokens)
        for some in reversed(pieces) if stored else pieces:  # each stored piece goes before the indexed ones
            self._ingest(problem, some, stored, ahead)

    def _ingest(self, problem: Problem, records: list[Record], stored: bool, ahead: bool) -> None:
        self._engine.ingest(
            problem.namespace,
            np.frombuffer(problem.prompt, INT32),
            **for_engine(records),
            problem=problem.name or None,
            stored=stored,
            ahead=ahead,
        )

    def held(self, problem: Problem) -> Held:
        """Returns the indexed responses of a problem."""
        prompt = np.frombuffer(problem.prompt, INT32)
        held = self._engine.history(problem.namespace, prompt, problem=problem.name or None)
        return Counter((tokens.tobytes(), epoch) for tokens, epoch in held)

    def share(self) -> float:
        """Returns the share of the memory budget that the index uses."""
        return self._engine.memory_bytes() / self._engine.memory_budget()

    async def drop(self, namespace: str, *, keep_learned: bool = False) -> None:
        """Drops a namespace after all earlier calls of `add`."""
        drop = self._engine.drop_namespace
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: drop(namespace, keep_learned=keep_learned))

    def close(self) -> None:
        """Blocks until all earlier calls are indexed."""
        self._thread.shutdown()
