"""What the engine counted and holds at one moment, by namespace."""

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
"""Columns that only grow while their namespace is there; the others say what is held."""


class EngineCounters(NamedTuple):
    """One look at the engine."""

    namespaces: list[str]
    columns: dict[str, int]
    """Where each number stands in a row; those by source and age are named `source.number`."""
    values: NDArray[np.int64]
    """A row for each namespace."""
    dropped: NDArray[np.int64]
    """What dropped namespaces had counted."""
    verify_costs: dict[str, float]
    """What workers say lately, by namespace; see VerifyCosts."""

    def totals(self) -> dict[str, int]:
        """Every number of all namespaces that are there or were, summed: no count ever falls."""
        return dict(zip(self.columns, (self.values.sum(axis=0) + self.dropped).tolist(), strict=True))

    def column(self, name: str) -> NDArray[np.int64]:
        """A number of every namespace."""
        return self.values[:, self.columns[name]]

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Where these stand in a row."""
        return [self.columns[name] for name in names]

    def row(self, number: int) -> dict[str, int]:
        """All numbers of one namespace."""
        return dict(zip(self.columns, self.values[number].tolist(), strict=True))


class EngineReader:
    """Looks at an engine, and at what open streams say of their steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.verify_costs = VerifyCosts()

    def read(self) -> EngineCounters:
        """What the engine says now."""
        namespaces, columns, values, dropped = self._engine.counters()
        costs = self.verify_costs.lately()
        if costs:
            there = set(namespaces)
            costs = {name: cost for name, cost in costs.items() if name in there}
        return EngineCounters(namespaces, {name: i for i, name in enumerate(columns)}, values, dropped, costs)

    def index_bytes(self) -> int:
        """What the index holds."""
        return self._engine.memory_bytes()
