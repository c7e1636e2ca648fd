"""Which namespaces have their own series, compared with a simple account of every count."""

import random
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
import pytest

from histospec.native import Engine
from histospec.server.observability.engine_counters import COUNTED, EngineCounters
from histospec.server.observability.labels import IDLE, OTHER_NAMESPACES, Labelled, Labels

COLUMNS = Engine(1 << 20).counters()[1]


class World:
    """Namespaces as an engine counts them, and a clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rows: dict[str, Counter[str]] = {}
        self.dropped: Counter[str] = Counter()

    def clock(self) -> float:
        return self.seconds

    def steps(self, *names: str, tokens: int = 1) -> None:
        for name in names:
            self._row(name).update({"lookups_miss": 1, "generated_tokens": tokens, "history.draft_tokens": 2 * tokens})

    def ingests(self, *names: str) -> None:
        for name in names:
            self._row(name).update({"history_responses": 1, "history_tokens": 9, "bytes": 100})

    def evicts(self, name: str) -> None:
        if self.rows[name]["history_responses"]:
            self.rows[name].update({"history_responses": -1, "history_tokens": -9, "evicted_by_memory": 1})

    def opens(self, name: str, sessions: int = 1) -> None:
        self._row(name)["sessions"] = sessions

    def drops(self, *names: str) -> None:
        for name in names:
            row = self.rows.pop(name)
            self.dropped.update({column: row[column] for column in COUNTED})

    def _row(self, name: str) -> Counter[str]:
        return self.rows.setdefault(name, Counter())

    def look(self) -> EngineCounters:
        names = random.sample(list(self.rows), len(self.rows))  # an engine's namespaces have no order
        values = np.array([[self.rows[name][column] for column in COLUMNS] for name in names], np.int64)
        dropped = np.array([self.dropped[column] for column in COLUMNS], np.int64)
        places = {column: place for place, column in enumerate(COLUMNS)}
        return EngineCounters(names, places, values.reshape(len(names), len(COLUMNS)), dropped, {})

    def counted(self) -> Counter[str]:
        """Returns the sum over current and dropped namespaces."""
        total = Counter(self.dropped)
        for row in self.rows.values():
            total.update({column: row[column] for column in COUNTED})
        return total


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def labels(world: World) -> Labels:
    return Labels(most=3, clock=world.clock)


def by_name(shown: Labelled) -> dict[str, dict[str, int]]:
    return {name: dict(zip(COLUMNS, row.tolist(), strict=True)) for name, row in zip(*shown, strict=True)}


def named(labels: Labels, world: World) -> set[str]:
    """Returns the namespaces that have a label."""
    return set(labels.show(world.look()).names) - {OTHER_NAMESPACES}


def names(count: int, first: int = 0) -> list[str]:
    return [f"run-{number}" for number in range(first, first + count)]


def increase(now: dict[str, int], before: dict[str, int] | None) -> Counter[str]:
    """Returns the increase between two samples as Prometheus computes it: a lower value starts again from 0."""
    before = before or {}
    return Counter({c: now[c] - before.get(c, 0) if now[c] >= before.get(c, 0) else now[c] for c in COUNTED})


@pytest.mark.parametrize("seed", range(30))
def test_every_count_shows_in_one_series_and_none_falls(seed: int) -> None:
    """Namespaces come, work, rest, are evicted and dropped at random; there are more of them than labels.

    1. Each label shows its namespace's own counters; `_other` shows those of the others.
    2. The increase of all series, as Prometheus computes it, equals the exact sum of all counts.
    3. No counter of `_other` falls. No hour has more than three names per label.
    """
    pick = random.Random(seed)
    random.seed(seed)
    world, most = World(), pick.choice([1, 2, 5])
    labels = Labels(most, world.clock)
    shown: dict[str, dict[str, int]] = {}
    there: set[str] = set()
    counted: Counter[str] = Counter()
    seen: deque[tuple[float, set[str]]] = deque()
    for _ in range(300):
        for _ in range(pick.randrange(4)):
            name = f"run-{pick.randrange(12)}"
            what = pick.choice(["steps", "steps", "ingests", "opens", "closes", "evicts", "drops"])
            if what in ("steps", "ingests"):
                getattr(world, what)(name)
            elif what in ("opens", "closes"):
                world.opens(name, int(what == "opens"))
            elif name in world.rows:
                getattr(world, what)(name)
        world.seconds += pick.choice([1.0, 15.0, 600.0, 4000.0])
        now = by_name(labels.show(world.look()))
        others = [row for name, row in world.rows.items() if name not in now]
        assert len(now.keys() - {OTHER_NAMESPACES}) <= most
        assert all(row[c] == world.rows[n][c] for n, row in now.items() if n != OTHER_NAMESPACES for c in COLUMNS)
        if others:
            assert all(
                now[OTHER_NAMESPACES][c] == sum(row[c] for row in others) for c in ("bytes", "sessions", "problems")
            )
        grown: Counter[str] = Counter()
        for name, row in now.items():
            if name in shown or name not in there:
                grown.update(increase(row, shown.get(name)))
        total = world.counted()
        assert {c: grown[c] for c in COUNTED} == {c: total[c] - counted[c] for c in COUNTED}
        if {OTHER_NAMESPACES} <= shown.keys() & now.keys():
            assert all(now[OTHER_NAMESPACES][c] >= shown[OTHER_NAMESPACES][c] for c in COUNTED)
        shown, there, counted = now, set(world.rows), total
        seen.append((world.seconds, set(now) - {OTHER_NAMESPACES}))
        while seen[0][0] <= world.seconds - IDLE:
            seen.popleft()
        assert len(set().union(*(some for _, some in seen))) <= 3 * most


def test_without_more_namespaces_than_labels_there_is_no_other(world: World, labels: Labels) -> None:
    assert labels.show(world.look()).names == []
    world.steps(*names(3))
    assert named(labels, world) == set(names(3))
    world.drops("run-0")
    assert labels.show(world.look()).names == names(2, first=1)


def test_a_namespace_of_the_name_of_the_others_is_one_of_them(world: World, labels: Labels) -> None:
    world.steps(OTHER_NAMESPACES, "run-0", tokens=3)
    shown = labels.show(world.look())
    assert shown.names == ["run-0", OTHER_NAMESPACES]
    assert by_name(shown)[OTHER_NAMESPACES]["generated_tokens"] == 3


def test_what_no_look_saw_of_a_namespace_is_counted_with_the_others(world: World, labels: Labels) -> None:
    world.steps("short", tokens=7)
    world.drops("short")
    assert by_name(labels.show(world.look()))[OTHER_NAMESPACES]["generated_tokens"] == 7


def full(world: World, labels: Labels) -> None:
    """Three runs have the three labels, and an hour passes."""
    world.steps(*names(3))
    assert named(labels, world) == set(names(3))
    world.seconds += IDLE


def test_a_run_that_works_keeps_its_label(world: World, labels: Labels) -> None:
    full(world, labels)
    for _ in range(3):
        world.steps(*names(5))
        assert named(labels, world) == set(names(3))
        world.seconds += IDLE


def test_an_open_session_keeps_a_label_and_so_does_an_ingest(world: World, labels: Labels) -> None:
    full(world, labels)
    world.opens("run-0")
    world.ingests("run-1")
    assert named(labels, world) == set(names(3))
    world.steps("new")
    assert named(labels, world) == {"run-0", "run-1", "new"}


def test_an_idle_run_loses_its_label_only_to_an_active_one(world: World, labels: Labels) -> None:
    world.ingests("run-0", "idle")
    full(world, labels)
    world.steps("run-1", "run-2")
    assert named(labels, world) == set(names(3))
    world.evicts("run-0")  # an eviction does not count as activity
    world.steps("new")
    assert named(labels, world) == {"run-1", "run-2", "new"}


def test_the_most_active_run_gets_the_label(world: World, labels: Labels) -> None:
    full(world, labels)
    world.steps("run-0", "run-1")
    world.steps("little", tokens=5)
    world.steps("much", tokens=50)
    world.steps("less", tokens=20)
    assert named(labels, world) == {"run-0", "run-1", "much"}


def test_a_label_of_a_dropped_run_is_free_an_hour_after_it_was_given(world: World, labels: Labels) -> None:
    world.steps(*names(3))
    labels.show(world.look())
    world.drops("run-0")
    world.steps("new")
    world.seconds += IDLE - 1
    assert named(labels, world) == {"run-1", "run-2"}
    world.seconds += 1
    assert named(labels, world) == {"run-1", "run-2", "new"}


def test_a_run_that_is_dropped_and_comes_again_has_its_label_at_once(world: World, labels: Labels) -> None:
    world.steps(*names(3))
    labels.show(world.look())
    world.drops("run-0")
    world.steps("new")
    labels.show(world.look())
    world.steps("run-0", tokens=4)
    assert by_name(labels.show(world.look()))["run-0"]["generated_tokens"] == 4


def test_what_was_loaded_from_the_store_makes_room_for_runs_at_once(world: World, labels: Labels) -> None:
    """After a restart, labels go to the namespaces loaded first, and the workers come minutes later."""
    world.ingests(*names(5))
    stored = named(labels, world)
    world.seconds += 60
    world.steps("run-3", "run-4", "new")
    assert named(labels, world) == {"run-3", "run-4", "new"}
    assert stored != {"run-3", "run-4", "new"}


def test_a_run_that_gets_its_label_again_goes_on_from_its_own_counters(world: World, labels: Labels) -> None:
    def shown() -> dict[str, int]:
        return {name: row["generated_tokens"] for name, row in by_name(labels.show(world.look())).items()}

    full(world, labels)
    world.steps("run-1", "run-2", "new")
    assert shown() == {"run-1": 2, "run-2": 2, "new": 1, OTHER_NAMESPACES: 0}
    world.steps("run-0", tokens=10)
    assert shown() == {"run-1": 2, "run-2": 2, "new": 1, OTHER_NAMESPACES: 10}
    world.seconds += IDLE
    world.steps("run-0", "run-1", "run-2", tokens=5)
    assert shown() == {"run-0": 16, "run-1": 7, "run-2": 7, OTHER_NAMESPACES: 15}
    world.steps("run-0", "new")
    assert shown() == {"run-0": 17, "run-1": 7, "run-2": 7, OTHER_NAMESPACES: 16}


def sizes(labels: Labels) -> Iterable[int]:
    return (len(labels._given), len(labels._places), len(labels._shown), len(labels._changes), len(labels._active))


def test_what_is_kept_does_not_grow_with_the_names_that_ever_were(world: World, labels: Labels) -> None:
    for number in range(500):
        world.steps(*names(6, first=6 * number))
        labels.show(world.look())
        world.drops(*names(6, first=6 * number))
        world.seconds += 3000
    assert max(sizes(labels)) <= 7
