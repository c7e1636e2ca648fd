"""The counters and contents of the engine at one moment, by namespace."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.native import AGES, COUNTERS, SOURCES, Engine
from histospec.server.observability.verify_costs import VerifyCosts

COUNTED = (
    *(name for name, *_ in COUNTERS),
    *(f"{kind}.{what}" for kind in (*SOURCES, *AGES) for what in ("draft_tokens", "accepted_tokens")),
)
"""Columns that only grow while their namespace exists. The other columns say what the namespace holds."""


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
