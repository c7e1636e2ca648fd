"""A real Prometheus keeps runs apart by their names, also if its operator labels targets with `namespace`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from histospec.client import DraftClient
from tests.support.busy import known_problems, new_problems, repeated
from tests.support.charts import Manifest, one, render
from tests.support.programs import ROOT
from tests.support.prometheus import PANELS, Prometheus, as_the_operator_does, samples
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Wire

RUNS = {"good", "bad"}
BY_RUN = [
    (title, t["expr"]) for title, panel in PANELS.items() for t in panel["targets"] if "{{run}}" in t["legendFormat"]
]
ADAPTER = yaml.safe_load((ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text())


NAMES = {
    'a "quoted" name',
    "back\\slash\\n",
    "two\nlines",
    "50% of %d",
    "{braces}",
    "a=b,c",
    "ünï → 日本",
    "_other",
    "run",
}


def pods(*servers: Server) -> dict[str, str]:
    return {f"histospec-{number}": server.http for number, server in enumerate(servers)}


@pytest.fixture(scope="module")
def shards(start_shared: Starter) -> Iterator[list[Server]]:
    """Two shards. The first one has two runs: in one, every session finds history; in the other, none does."""
    servers = [start_shared(), start_shared()]
    endpoint = servers[0].endpoint
    with (
        DraftClient(endpoint, "good", deadline=5.0) as good, DraftClient(endpoint, "bad", deadline=5.0) as bad,
        repeated(known_problems(good)), repeated(new_problems(bad)),
    ):  # fmt: skip
        yield servers


def at_once(rules: Manifest, folder: Path) -> Path:
    """Returns the rules of a PrometheusRule, with windows of seconds instead of hours."""
    for rule in (rule for group in rules["spec"]["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[\d+[mhd]\]", "[10s]", rule["expr"])
        rule.pop("for", None)
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(rules["spec"]))
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["honored", "overridden"])
def prometheus(
    shards: list[Server], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Prometheus]:
    """Scrapes as the chart's ServiceMonitor says, or as an operator that ignores labels of targets."""
    folder = tmp_path_factory.mktemp("prometheus")
    chart = render("--set", "serviceMonitor.enabled=true,prometheusRule.enabled=true")
    scrape = as_the_operator_does(one(chart, "ServiceMonitor"), pods(*shards), override_honor_labels=request.param)
    with Prometheus(folder, scrape, at_once(one(chart, "PrometheusRule"), folder)) as prometheus:
        yield prometheus


def runs_of(found: list[dict[str, Any]]) -> set[str]:
    return {sample["metric"]["run"] for sample in found}


def test_the_label_namespace_is_not_to_be_relied_on(prometheus: Prometheus, request: pytest.FixtureRequest) -> None:
    """The premise of these tests: the label `namespace` of a series is the run's or the pod's, as the scrape says."""
    metric = "histospec_drafts_total"
    eventually(lambda: prometheus.query(metric), f"{metric} is not scraped")
    found = {series["metric"]["namespace"] for series in prometheus.query(metric)}
    assert found == (RUNS if "honored" in request.node.callspec.id else {"rl"})


@pytest.mark.parametrize(("title", "expression"), BY_RUN, ids=[title for title, _ in BY_RUN])
def test_panels_keep_runs_apart(prometheus: Prometheus, title: str, expression: str) -> None:
    shown = {"good"} if "twin" in expression else RUNS  # the other run has no seeds
    eventually(lambda: runs_of(samples(prometheus, expression)) == shown, f"{title}: not every run has a line")
    eventually(lambda: runs_of(samples(prometheus, expression, run="good")) == {"good"}, title)


def test_every_selector_has_the_variables_that_its_series_know(prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.query('histospec_drafts_total{run="bad"}'))
    by_run = {series["metric"]["__name__"] for series in prometheus.query('{run!=""}')}
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            selectors = re.findall(r"\b((?:histospec|process)_[a-z_]+)\{(.*?)\}", target["expr"])
            assert selectors
            for metric, labels in selectors:
                assert 'instance=~"$instance"' in labels, title
                assert ('run=~"$run"' in labels) == (metric in by_run), f"{title}: {metric}"


def test_the_variable_offers_the_runs(prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.ask("label/run/values", **{"match[]": "histospec_drafts_total"}) == sorted(RUNS))


def test_an_alert_names_the_run_that_it_is_about(prometheus: Prometheus) -> None:
    def firing() -> set[str]:
        return {
            alert["labels"]["run"]
            for alert in prometheus.ask("alerts")["alerts"]
            if alert["labels"]["alertname"] == "HistoSpecHitRateLow" and alert["state"] == "firing"
        }

    eventually(lambda: firing() == {"bad"}, "HistoSpecHitRateLow does not fire for the run without hits alone")


def test_the_adapter_finds_the_load_of_every_pod(prometheus: Prometheus) -> None:
    """The adapter's rule, expanded as it does for the pods of a HorizontalPodAutoscaler."""
    (rule,) = ADAPTER["rules"]["custom"]
    found = prometheus.ask("series", **{"match[]": rule["seriesQuery"]})
    assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}
    (name,) = {series["__name__"] for series in found}
    assert re.fullmatch(rule["name"]["matches"], name)
    query = (
        rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        .replace("<<.LabelMatchers>>", 'namespace="rl",pod=~"histospec-0|histospec-1"')
    )  # fmt: skip
    assert "<<" not in query

    def loads() -> dict[str, float]:
        return {sample["metric"]["pod"]: float(sample["value"][1]) for sample in prometheus.query(query)}

    eventually(lambda: loads().keys() == {"histospec-0", "histospec-1"}, "not every pod has a load")
    eventually(lambda: 1.1 > loads()["histospec-0"] > loads()["histospec-1"], "the busy shard has no higher load")


def test_prometheus_reads_every_name_and_number(server: Server, wire: Wire, tmp_path: Path) -> None:
    for number, name in enumerate(sorted(NAMES)):
        stream = wire.stream()
        stream.ask(opens=[wire.open(1, namespace=name)], step=wire.step([1], [range(number + 2)]))
        stream.end()
    with Prometheus(tmp_path, [server.http]) as prometheus:
        eventually(lambda: prometheus.query("histospec_generated_tokens_total"), "nothing is scraped")
        found = prometheus.query("histospec_generated_tokens_total")
        assert {series["metric"]["run"]: float(series["value"][1]) for series in found} == {
            name: number + 2 for number, name in enumerate(sorted(NAMES))
        }
        assert all(series["metric"]["run"] == series["metric"]["namespace"] for series in found)
        assert [series["value"][1] for series in prometheus.query("up")] == ["1"]
