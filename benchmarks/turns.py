"""Ways to do one thing that take turns, so that a busy machine slows all alike, and the medians of their figures."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def by_turns(ways: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Calls every way once a round. -> what its calls returned, by way."""
    figures: dict[Key, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            figures[name].append(way())
    return figures


def medians(figures: Mapping[Key, Iterable[float]]) -> dict[Key, float]:
    """The median of each list of figures."""
    return {name: statistics.median(values) for name, values in figures.items()}


def median_row(rows: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """The median of each column. All rows have the columns of the first."""
    return medians({name: [row[name] for row in rows] for name in rows[0]})
