"""The engine's counters and contents at one moment, by namespace, and the verify costs that its streams report."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.native import AGES, COUNTERS, SOURCES, Engine

COUNTED = (
    *(name for name, *_ in COUNTERS),
    *(f"{kind}.{what}" for kind in (*SOURCES, *AGES) for what in ("draft_tokens", "accepted_tokens")),
)
"""Columns that only grow while their namespace exists. The other columns say what the namespace holds."""

LATELY = 300.0
"""Seconds after which a stream that has not stepped no longer counts."""

StreamCosts = dict[str, tuple[float, float]]
"""The reports of one stream, by namespace: the cost of its last step, and the time."""


class EngineCounters(NamedTuple):
    """One reading of the engine."""

    namespaces: list[str]
    columns: dict[str, int]
    """The index of each number in a row; names by source and age are `source.number`."""
    values: NDArray[np.int64]
    """One row per namespace."""
    dropped: NDArray[np.int64]
    """The final counters of dropped namespaces."""
    verify_costs: dict[str, float]
    """The recent verify costs by namespace; see VerifyCosts."""

    def totals(self) -> dict[str, int]:
        """Returns the sums of all numbers over current and dropped namespaces. A count never falls."""
        return dict(zip(self.columns, (self.values.sum(axis=0) + self.dropped).tolist(), strict=True))

    def column(self, name: str) -> NDArray[np.int64]:
        """Returns one number of every namespace."""
        return self.values[:, self.columns[name]]

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Returns the indices of these numbers in a row."""
        return [self.columns[name] for name in names]

    def row(self, number: int) -> dict[str, int]:
        """Returns all numbers of one namespace."""
        return dict(zip(self.columns, self.values[number].tolist(), strict=True))


class VerifyCosts:
    """One entry per stream and namespace. Written on the event loop, read from any thread.

    Args:
        clock: monotonic clock in seconds.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._streams: dict[int, StreamCosts] = {}

    def open(self) -> StreamCosts:
        """Returns the dictionary in which a new stream records its costs, with the time of `clock`."""
        stream: StreamCosts = {}
        self._streams[id(stream)] = stream
        return stream

    def close(self, stream: StreamCosts) -> None:
        """Removes an ended stream."""
        self._streams.pop(id(stream), None)

    def lately(self) -> dict[str, float]:
        """Returns the median over streams, by namespace; no entry for a namespace without active streams."""
        oldest = self.clock() - LATELY
        costs: dict[str, list[float]] = defaultdict(list)
        for stream in self._streams.copy().values():  # copies: streams change them meanwhile
            for namespace, (cost, when) in stream.copy().items():
                if when >= oldest:
                    costs[namespace].append(cost)
        return {namespace: statistics.median(some) for namespace, some in costs.items()}


class EngineReader:
    """Reads an engine, and the verify costs of open streams."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.verify_costs = VerifyCosts()

    def read(self) -> EngineCounters:
        """Returns the current counters."""
        namespaces, columns, values, dropped = self._engine.counters()
        costs = self.verify_costs.lately()
        if costs:
            there = set(namespaces)
            costs = {name: cost for name, cost in costs.items() if name in there}
        return EngineCounters(namespaces, {name: i for i, name in enumerate(columns)}, values, dropped, costs)

    def index_bytes(self) -> int:
        """Returns the memory of the index."""
        return self._engine.memory_bytes()
