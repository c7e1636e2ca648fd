"""Alert rules: each has a test and a runbook, and fires as its test says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.dashboard import RULES
from tests.support.prometheus import promtool
from tests.support.servers import Starter
from tests.support.wires import Connector

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "helm" / "histospec" / "files" / "alerts-kubernetes.yaml"
CASES = sorted(Path(__file__).parent.glob("alerts*.test.yaml"))
RUNBOOK = ("**Means:**", "**Look at:**", "**Do:**")


def alerts(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the rules of a file by alert name."""
    return {rule["alert"]: rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]}


def cases(path: Path) -> list[dict[str, Any]]:
    """Returns the expectations of a file of tests: one alert at one time each."""
    return [check for test in yaml.safe_load(path.read_text())["tests"] for check in test["alert_rule_test"]]


ALERTS = [(path, name) for path in (RULES, KUBERNETES) for name in alerts(path)]
each_alert = pytest.mark.parametrize(("path", "name"), ALERTS, ids=[f"{p.stem}-{name}" for p, name in ALERTS])


@pytest.mark.parametrize("path", [RULES, KUBERNETES], ids=lambda path: path.stem)
def test_rules_are_well_formed(path: Path) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))


@pytest.mark.parametrize("path", [path for path in CASES if "kubernetes" not in path.name], ids=lambda path: path.name)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    """alerts-kubernetes.test.yaml is left out: its rules are rendered by the chart, see test_alerts_kubernetes.py."""
    promtool("test", "rules", str(path))


@each_alert
def test_every_alert_is_tested_both_ways(path: Path, name: str) -> None:
    files = [case for case in CASES if ("kubernetes" in case.name) == (path == KUBERNETES)]
    expected = [check["exp_alerts"] for case in files for check in cases(case) if check["alertname"] == name]
    assert any(expected)
    assert not all(expected)


@each_alert
def test_every_alert_says_how_bad_it_is_and_what_to_do(path: Path, name: str) -> None:
    alert = alerts(path)[name]
    assert alert["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    page, anchor = alert["annotations"]["runbook_url"].split("#")
    sections = re.split(r"^#+ ", (ROOT / page).read_text(), flags=re.MULTILINE)
    (runbook,) = [section for section in sections if section.partition("\n")[0].lower() == anchor]
    assert [part for part in RUNBOOK if f"\n{part}" in runbook] == list(RUNBOOK)


def test_no_runbook_is_left_over() -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text()
    urls = {alerts(path)[name]["annotations"]["runbook_url"] for path, name in ALERTS}
    assert {f"docs/runbooks.md#{heading.lower()}" for heading in re.findall(r"^## (.+)$", page, re.M)} == urls


@pytest.mark.parametrize("name", alerts(RULES))
def test_no_rule_depends_on_a_label_that_prometheus_may_rename(name: str) -> None:
    assert not re.search(r"\bnamespace\b", alerts(RULES)[name]["expr"]), "a run is named by the label `run`"


@pytest.mark.parametrize("name", alerts(RULES))
def test_a_rule_that_adds_up_series_of_a_shard_keeps_its_pod(name: str) -> None:
    """In a cluster, an address alone does not identify a shard."""
    by = re.match(r"(?:histogram_quantile\(0\.\d+, )?sum by \((.*?)\)", alerts(RULES)[name]["expr"])
    assert by is None or "instance" not in by[1] or "pod" in by[1]


def test_alerts_ask_for_metrics_that_a_server_has(start_server: Starter, connect: Connector) -> None:
    server = start_server("--disk", "1GiB")
    connect(server.endpoint).ingest([1], [[2]])
    names = set(re.findall(r"^([a-z_]+)[ {]", server.get("/metrics")[1], re.MULTILINE))
    names |= {"histospec_certificate_expiry_timestamp_seconds"}  # only with TLS
    names |= {"histospec_watched_file_unreadable"}  # only with tokens or TLS
    expressions = " ".join(alerts(path)[name]["expr"] for path, name in ALERTS)
    asked = set(re.findall(r"\b(?:histospec|process)_[a-z_]+", expressions))
    assert asked
    assert asked - names == set()
