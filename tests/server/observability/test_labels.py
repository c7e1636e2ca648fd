"""Which namespaces have their own series, compared with a simple account of every count."""

import random
from collections import Counter

import numpy as np
import pytest

from histospec.native import Engine
from histospec.server.observability.engine_counters import COUNTED, EngineCounters
from histospec.server.observability.run_series import OTHER, Labels

COLUMNS = Engine(1 << 20).counters()[1]

Shown = dict[str, dict[str, int]]


class World:
    """Namespaces as an engine counts them, and the labels that they get."""

    def __init__(self, most: int = 3) -> None:
        self.rows: dict[str, Counter[str]] = {}
        self.dropped: Counter[str] = Counter()
        self.labels = Labels(most)

    def steps(self, *names: str, tokens: int = 1) -> None:
        for name in names:
            self._row(name).update({"lookups_miss": 1, "generated_tokens": tokens, "history.draft_tokens": 2 * tokens})

    def ingests(self, name: str) -> None:
        self._row(name).update({"history_responses": 1, "history_tokens": 9, "bytes": 100})

    def drops(self, *names: str) -> None:
        for name in names:
            row = self.rows.pop(name, Counter())
            self.dropped.update({column: row[column] for column in COUNTED})

    def _row(self, name: str) -> Counter[str]:
        return self.rows.setdefault(name, Counter())

    def shown(self) -> Shown:
        """Returns the rows of a scrape by label."""
        names = random.sample(list(self.rows), len(self.rows))  # an engine's namespaces have no order
        values = np.array([[self.rows[name][column] for column in COLUMNS] for name in names], np.int64)
        dropped = np.array([self.dropped[column] for column in COLUMNS], np.int64)
        places = {column: place for place, column in enumerate(COLUMNS)}
        now = EngineCounters(names, places, values.reshape(len(names), len(COLUMNS)), dropped, {})
        return {
            name: dict(zip(COLUMNS, row.tolist(), strict=True))
            for name, row in zip(*self.labels.rows(now), strict=True)
        }

    def generated(self) -> dict[str, int]:
        return {name: row["generated_tokens"] for name, row in self.shown().items()}

    def counted(self) -> Counter[str]:
        """Returns the sum over current and dropped namespaces."""
        total = Counter(self.dropped)
        for row in self.rows.values():
            total.update({column: row[column] for column in COUNTED})
        return total


def increase(now: dict[str, int], before: dict[str, int] | None) -> Counter[str]:
    """Returns the increase between two samples as Prometheus computes it: a lower value starts again from 0."""
    before = before or {}
    return Counter({c: now[c] - before.get(c, 0) if now[c] >= before.get(c, 0) else now[c] for c in COUNTED})


@pytest.mark.parametrize("seed", range(30))
def test_every_count_shows_in_one_series_and_none_falls(seed: int) -> None:
    """Namespaces come, work and are dropped at random; there are more of them than labels.

    1. Each label shows its namespace's own counters; `_other` shows those of the others.
    2. The increase of all series, as Prometheus computes it, equals the exact sum of all counts.
    3. No counter of `_other` falls. A namespace keeps its label until it is dropped.
    """
    pick = random.Random(seed)
    random.seed(seed)
    most = pick.choice([1, 2, 5])
    world = World(most)
    shown: Shown = {}
    there: set[str] = set()
    counted: Counter[str] = Counter()
    for _ in range(300):
        for _ in range(pick.randrange(4)):
            getattr(world, pick.choice(["steps", "steps", "ingests", "drops"]))(f"run-{pick.randrange(12)}")
        now = world.shown()
        others = [row for name, row in world.rows.items() if name not in now]
        assert len(now.keys() - {OTHER}) == min(most, len(world.rows))
        assert all(row[c] == world.rows[n][c] for n, row in now.items() if n != OTHER for c in COLUMNS)
        if others:
            assert all(now[OTHER][c] == sum(row[c] for row in others) for c in ("bytes", "sessions", "problems"))
        grown: Counter[str] = Counter()
        for name, row in now.items():
            if name in shown or name not in there:
                grown.update(increase(row, shown.get(name)))
        total = world.counted()
        assert {c: grown[c] for c in COUNTED} == {c: total[c] - counted[c] for c in COUNTED}
        if {OTHER} <= shown.keys() & now.keys():
            assert all(now[OTHER][c] >= shown[OTHER][c] for c in COUNTED)
        assert shown.keys() & world.rows.keys() <= now.keys()
        shown, there, counted = now, set(world.rows), total


def test_without_more_namespaces_than_labels_there_is_no_other() -> None:
    world = World()
    assert world.generated() == {}
    world.steps("a", "b", "c")
    assert world.generated() == {"a": 1, "b": 1, "c": 1}
    world.drops("a")
    assert world.generated() == {"b": 1, "c": 1}


def test_a_namespace_of_the_name_of_the_others_is_one_of_them() -> None:
    world = World()
    world.steps(OTHER, "run-0", tokens=3)
    assert world.generated() == {"run-0": 3, OTHER: 3}


def test_what_no_scrape_saw_of_a_namespace_is_counted_with_the_others() -> None:
    world = World()
    world.steps("short", tokens=7)
    world.drops("short")
    assert world.generated() == {OTHER: 7}


def test_the_label_of_a_dropped_run_goes_to_the_one_that_waited_longest() -> None:
    world = World(most=2)
    world.steps("a", "b")
    world.generated()
    for name in ("c", "d"):
        world.steps(name, tokens=10)
        world.generated()
    world.drops("a")
    world.steps("e", tokens=5)
    assert world.generated() == {"b": 1, "c": 10, OTHER: 25}  # also 10 of "c" from before
    world.steps("c", "d", tokens=2)
    assert world.generated() == {"b": 1, "c": 12, OTHER: 27}


def test_what_is_kept_does_not_grow_with_the_names_that_ever_were() -> None:
    world = World()
    for number in range(500):
        names = [f"run-{number}-{i}" for i in range(6)]
        world.steps(*names)
        world.shown()
        world.drops(*names)
    world.shown()
    assert (len(world.labels._labelled), len(world.labels._waiting)) == (0, 0)
