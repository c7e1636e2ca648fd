"""Runs alternatives in turns, so that a busy machine slows all of them equally, and takes medians of their figures."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def by_turns(ways: Mapping[Key, Callable[[], Result]], rounds: int) -> dict[Key, list[Result]]:
    """Calls every alternative once per round. Returns the results of each."""
    figures: dict[Key, list[Result]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            figures[name].append(way())
    return figures


def medians(figures: Mapping[Key, Iterable[float]]) -> dict[Key, float]:
    """Returns the median of each list of figures."""
    return {name: statistics.median(values) for name, values in figures.items()}


def median_row(rows: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Returns the median of each column. All rows must have the columns of the first."""
    return medians({name: [row[name] for row in rows] for name in rows[0]})
