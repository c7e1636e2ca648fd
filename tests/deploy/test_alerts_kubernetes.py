"""The alert rules that the chart renders: for pods that no scrape finds, and for one release each."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.charts import CHART, helm, one, render
from tests.support.prometheus import promtool

TESTS = Path(__file__).with_name("alerts-kubernetes.test.yaml")
ON = "serviceMonitor.enabled=true,prometheusRule.enabled=true"
RELEASES = {"rl-run": "mode=statefulset", "eval-run": "mode=statefulset", "rl-drafts": "mode=daemonset"}

Rules = dict[str, dict[str, Any]]


def rules(*words: object) -> Rules:
    """Returns the rules that the chart renders, by alert name."""
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
        spec = one(list(yaml.safe_load_all(done.stdout)), "PrometheusRule")["spec"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    shutil.copy(TESTS, folder)
    return folder


@pytest.mark.parametrize("name", RELEASES)
def test_rendered_rules_are_well_formed(releases: Path, name: str) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(releases / f"{name}.yaml"))


def test_no_release_alerts_for_another(releases: Path) -> None:
    promtool("test", "rules", str(releases / TESTS.name))


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


def test_rules_of_the_cluster_take_the_place_of_those_of_their_name() -> None:
    both, alone = rules(), rules("--set", "prometheusRule.kubernetes=false")
    assert alone.keys() < both.keys()
    assert "kube_" not in str(alone.values())
    assert "kube_" in both["HistoSpecRestarting"]["expr"]
    assert "process_start_time_seconds" in alone["HistoSpecRestarting"]["expr"]
