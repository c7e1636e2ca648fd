"""Alert rules: each has a test and a runbook, fires as its test says, and in a chart is for one release."""

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from histospec.server.settings.budget import fitting
from tests.support.charts import CHART, helm, objects_in, one, refusal, render
from tests.support.prometheus import RULES, promtool
from tests.support.servers import Starter
from tests.support.wires import Connector

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "helm" / "histospec" / "files" / "alerts-kubernetes.yaml"
CASES = sorted(Path(__file__).parent.glob("alerts*.test.yaml"))
KUBERNETES_CASES = Path(__file__).with_name("alerts-kubernetes.test.yaml")
ON = "serviceMonitor.enabled=true,prometheusRule.enabled=true"
BACKUP = "backup.enabled=true,backup.destination.persistentVolumeClaim=backups"
RELEASES = {
    "rl-run": f"mode=statefulset,{BACKUP},backup.maxAgeHours=3",
    "eval-run": "mode=statefulset",
    "rl-drafts": "mode=daemonset",
}
RUNBOOK = ("**Means:**", "**Look at:**", "**Do:**")


@cache
def alerts(path: Path) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]}


@cache
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
    """alerts-kubernetes.test.yaml is left out: its rules are those that the chart renders."""
    promtool("test", "rules", str(path))


def limits() -> dict[int, int]:
    """Returns the table of docs/run-a-server.md: the largest --memory in MiB, by the limit of the container in GiB."""
    page = (ROOT / "docs" / "run-a-server.md").read_text()
    rows = [
        re.findall(r"(\d+) [GM]iB", line) for line in page.splitlines() if line.startswith(("| limit of", "| `--mem"))
    ]
    return {int(limit): int(most) for limit, most in zip(*rows, strict=True)}


def test_one_rule_says_how_much_memory_an_index_leaves(tmp_path: Path) -> None:
    """Server, chart, alert and page agree on the largest --memory for a limit."""
    assert len(limits()) >= 5
    series = []
    for limit, most in limits().items():
        assert fitting(limit << 30) == most << 20
        said = refusal("--set", f"options.memory=4TiB,resources.limits.memory={limit}Gi")
        assert f"Give it at most {most}MiB" in said
        for budget in (most, most + 2):
            of = f'{{job="histospec", instance="{budget}"}}'
            series.append({"series": f"histospec_memory_limit_bytes{of}", "values": f"{limit << 30}x20"})
            series.append({"series": f"histospec_memory_budget_bytes{of}", "values": f"{budget << 20}x20"})
    expected = 'count by (instance) (ALERTS{alertname="HistoSpecMemoryTight", alertstate="firing"})'
    samples = [{"labels": f'{{instance="{most + 2}"}}', "value": 1} for most in limits().values()]
    case = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [{"expr": expected, "eval_time": "16m", "exp_samples": samples}],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


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
    names |= {"histospec_tenant_share"}  # only if the token file gives shares
    expressions = " ".join(alerts(path)[name]["expr"] for path, name in ALERTS)
    asked = set(re.findall(r"\b(?:histospec|process)_[a-z_]+", expressions))
    assert asked
    assert asked - names == set()


def rules(*words: object) -> dict[str, dict[str, Any]]:
    groups = one(render("--set", ON, *words), "PrometheusRule")["spec"]["groups"]
    named = [(rule["alert"], rule) for group in groups for rule in group["rules"]]
    assert len(named) == len(dict(named)), "an alert has two rules"
    return dict(named)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the rules of several releases in one cluster, one file each, and their tests."""
    folder = tmp_path_factory.mktemp("rules")
    for name, values in RELEASES.items():
        namespace, release = name.split("-")
        sets = f"{ON},{values},prometheusRule.runbookBase=https://example.com/"
        done = helm("template", release, CHART, "--namespace", namespace, "--set", sets, "--kube-version", "1.30.0")
        assert done.returncode == 0, done.stderr
        spec = one(objects_in(done.stdout), "PrometheusRule")["spec"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    shutil.copy(KUBERNETES_CASES, folder)
    return folder


@pytest.mark.parametrize("name", RELEASES)
def test_rendered_rules_are_well_formed(releases: Path, name: str) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(releases / f"{name}.yaml"))


def test_no_release_alerts_for_another(releases: Path) -> None:
    promtool("test", "rules", str(releases / KUBERNETES_CASES.name))


@pytest.mark.parametrize("name", RELEASES)
def test_every_selector_names_its_release(releases: Path, name: str) -> None:
    namespace, release = name.split("-")
    for group in yaml.safe_load((releases / f"{name}.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            selectors = re.findall(r"\b(up|(?:histospec|process|kube)_[a-z_]+)(?:\{(.*?)\})?", rule["expr"])
            assert selectors
            for metric, labels in selectors:
                mine = (
                    f'namespace="{namespace}"' if metric.startswith("kube_") else f'"{namespace}/{release}-histospec"'
                )
                assert mine in labels, f"{rule['alert']}: {metric}{{{labels}}}"
            assert rule["labels"]["namespace"] == namespace


def test_no_shard_is_missed_where_none_should_run() -> None:
    """With kube-state-metrics, a rule of the cluster sees how many should run."""
    alone = "prometheusRule.kubernetes=false"
    assert "HistoSpecAbsent" not in rules("--set", f"{alone},replicas=0")
    assert "HistoSpecAbsent" in rules("--set", alone)
    assert "HistoSpecAbsent" in rules("--set", "replicas=0")
    scaled = "store.kind=redis,store.url=redis://a,autoscaling.enabled=true"
    assert "HistoSpecAbsent" in rules("--set", f"{alone},replicas=0,{scaled}")


def test_rules_of_the_cluster_take_the_place_of_those_of_their_name() -> None:
    both, alone = rules(), rules("--set", "prometheusRule.kubernetes=false")
    assert rules("--set", BACKUP).keys() - both.keys() == {"HistoSpecBackupFailed", "HistoSpecBackupOld"}
    assert alone.keys() < both.keys()
    assert "kube_" not in str(alone.values())
    assert "kube_" in both["HistoSpecRestarting"]["expr"]
    assert "process_start_time_seconds" in alone["HistoSpecRestarting"]["expr"]
