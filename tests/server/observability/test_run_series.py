"""The series of runs agree with prometheus_client's output of the same numbers, and their number is bounded."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from histospec.native import AGES, SOURCES, Engine
from histospec.protocol.limits import MAX_NAMESPACE
from histospec.server.history.counts import Counts
from histospec.server.observability.metrics import Metrics
from histospec.server.observability.run_series import MAX_LABELS, OTHER, SERIES_OF_A_RUN

HOSTILE = (
    'a "quoted" name', "back\\slash", "two\nlines", "50%", "%d %s %(x)d", "{braces}", "a=b,c", "ünï → 日本", "\\n",
    "\t", " spaces ", "_other", "run", "#", "x" * MAX_NAMESPACE,
)  # fmt: skip
PAIRS = {
    "problem_lookups": ("result", {"hit": "lookups_hit", "miss": "lookups_miss"}),
    "twin_lookups": ("result", {"hit": "twins_hit", "miss": "twins_miss"}),
    "drafts": ("result", {"hit": "drafts_hit", "empty": "drafts_empty"}),
    "evicted_responses": ("reason", {name: f"evicted_by_{name}" for name in ("memory", "epochs", "responses")}),
}
SINGLE = (
    "misnamed_lookups", "draft_tokens", "accepted_tokens", "generated_tokens", "undrafted_tokens", "verify_microsteps",
    "index_failures",
)  # fmt: skip
OPEN_METRICS = "application/openmetrics-text"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Reference(Collector):
    """Returns the families of `engine.stats()`, one namespace and one number at a time."""

    def __init__(self, engine: Engine, costs: dict[str, float]) -> None:
        self._engine = engine
        self._costs = costs

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()["namespaces"]
        for name, (label, values) in PAIRS.items():
            family = CounterMetricFamily(f"histospec_{name}", name, labels=("namespace", "run", label))
            for run, numbers in stats.items():
                for value, number in values.items():
                    family.add_metric((run, run, value), numbers[number])  # type: ignore[literal-required]
            yield family
        for name in SINGLE:
            family = CounterMetricFamily(f"histospec_{name}", name, labels=("namespace", "run"))
            for run, numbers in stats.items():
                family.add_metric((run, run), numbers[name])  # type: ignore[literal-required]
            yield family
        for label, kinds in (("source", SOURCES), ("age", AGES)):
            for what in ("draft_tokens", "accepted_tokens"):
                family = CounterMetricFamily(f"histospec_{label}_{what}", what, labels=("namespace", "run", label))
                for run, numbers in stats.items():
                    for kind in kinds:
                        number = numbers[f"{label}s"][kind][what]  # type: ignore[literal-required]
                        family.add_metric((run, run, kind), number)
                yield family
        held = GaugeMetricFamily("histospec_namespace_bytes", "", labels=("namespace", "run"))
        cost = GaugeMetricFamily("histospec_verify_cost", "", labels=("namespace", "run"))
        for run, numbers in stats.items():
            held.add_metric((run, run), numbers["bytes"])
        for run, said in self._costs.items():
            cost.add_metric((run, run), said)
        yield from (held, cost)


def work(engine: Engine, namespace: str, responses: int) -> None:
    """Fills every kind of counter."""
    text = np.arange(10, 40, dtype=np.int32)
    for number in range(responses):
        engine.ingest(namespace, [1, 2], [text, text], epoch=number)
    session = engine.open(namespace, [1, 2], seed=7)
    engine.step(np.array([session]), text[:4], np.array([0, 4]))
    engine.step(np.array([session]), text[4:7], np.array([0, 3]))
    engine.close(session, commit=True)
    engine.close(engine.open(namespace, [3]), commit=False)


def exposed(metrics: Metrics, accept: str) -> str:
    encode, _ = choose_encoder(accept)
    return metrics.exposition(encode, accept == OPEN_METRICS).decode()


def samples(text: str, accept: str) -> tuple[Samples, dict[str, str]]:
    """Returns the samples, and the types of their families."""
    parse: Callable[[str], Iterable[Metric]] = text_string_to_metric_families
    if accept == OPEN_METRICS:
        parse = parse_open_metrics
    families = list(parse(text))
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    return found, {family.name: family.type for family in families}


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_it_is_what_prometheus_client_says(accept: str) -> None:
    engine = Engine(1 << 26, history_epochs=2)
    metrics = Metrics(engine, Counts())
    said = metrics.engine.verify_costs.open()
    for number, name in enumerate(HOSTILE):
        work(engine, name, number % 4)
        said[name] = 0.05 * number, metrics.engine.verify_costs.clock()
    engine.wait_until_built()
    reference = CollectorRegistry()
    reference.register(Reference(engine, {name: cost for name, (cost, _) in said.items()}))
    encode, _ = choose_encoder(accept)
    ours, our_types = samples(exposed(metrics, accept), accept)
    theirs, their_types = samples(encode(reference).decode(), accept)
    assert theirs.items() <= ours.items()
    assert their_types.items() <= our_types.items()
    by_run = {key: value for key, value in ours.items() if "run" in dict(key[1])}
    assert by_run == theirs
    assert all(dict(labels)["namespace"] == dict(labels)["run"] for _, labels in by_run)
    assert any(value > 0 for (name, _), value in theirs.items() if name == "histospec_evicted_responses_total")


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_a_second_look_has_new_numbers_and_new_names(accept: str) -> None:
    engine = Engine(1 << 26)
    metrics = Metrics(engine, Counts())

    def generated() -> dict[str, float]:
        found, _ = samples(exposed(metrics, accept), accept)
        name = "histospec_generated_tokens_total"
        return {dict(labels)["run"]: value for (kind, labels), value in found.items() if kind == name}

    assert generated() == {}
    work(engine, "a", 1)
    assert generated() == {"a": 7}
    work(engine, "a", 1)
    work(engine, "b", 1)
    assert generated() == {"a": 14, "b": 7}
    engine.drop_namespace("a")
    assert generated() == {"b": 7}


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_a_scrape_has_at_most_so_many_series_and_bytes(accept: str) -> None:
    """With 1,000 namespaces of the longest names: 40 series per label, and a few hundred of the server."""
    engine = Engine(1 << 28)
    metrics = Metrics(engine, Counts())
    said = metrics.engine.verify_costs.open()
    for number in range(1000):
        name = f"{number:0{MAX_NAMESPACE}}"
        work(engine, name, 1)
        said[name] = 0.5, metrics.engine.verify_costs.clock()
    assert SERIES_OF_A_RUN == 40
    text = exposed(metrics, accept)
    found, _ = samples(text, accept)
    runs = [dict(labels)["run"] for _, labels in found if "run" in dict(labels)]
    assert len(runs) == (MAX_LABELS + 1) * SERIES_OF_A_RUN == 10280
    assert len(set(runs)) == MAX_LABELS + 1
    assert OTHER in runs
    assert len(found) - len(runs) < 100
    assert len(text) < 10200 * (2 * MAX_NAMESPACE + 100)
