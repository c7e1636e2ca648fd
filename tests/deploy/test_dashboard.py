"""The dashboard, against a real Prometheus that scrapes a real server under load, or the demo: no panel is empty."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from histospec.client import DraftClient
from histospec.client.config import Tls
from tests.support import certificates
from tests.support.busy import known_problems, repeated
from tests.support.programs import ROOT, program
from tests.support.prometheus import DASHBOARD, PANELS, RULES, Prometheus, chosen, samples
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

TWINS = "histospec_twin_"  # expressions about coupled sampling, which the demo does not use
EVERY = 2.0  # seconds between checks of the panels that are still empty
# Grafana's own definition of a dashboard. Its types have enums where JSON has their values.
TYPES = """\
import type { Dashboard } from "@grafana/schema";
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
export const dashboard: Plain<Partial<Dashboard>> = %s;
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, start_shared: Starter) -> Iterator[Server]:
    files = certificates.issue(tmp_path_factory.mktemp("certificates"), trustme.CA())
    server = start_shared(*certificates.of_server(files))
    tls = Tls(ca=str(files / "ca.pem"))
    with DraftClient(server.endpoint, "run", tls=tls, deadline=5.0) as client, repeated(known_problems(client)):
        yield server


@pytest.fixture(scope="module")
def prometheus(loaded: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [loaded.http], RULES) as prometheus:
        yield prometheus


@pytest.mark.parametrize("title", PANELS)
def test_no_panel_is_empty(prometheus: Prometheus, title: str) -> None:
    """Each expression returns numbers with the labels of its legend."""
    assert PANELS[title]["targets"]
    for target in PANELS[title]["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        expression = target["expr"]
        assert "$" not in chosen(expression)
        eventually(partial(samples, prometheus, expression), f"{title}: {expression} yields nothing")
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(named <= sample["metric"].keys() for sample in samples(prometheus, expression))


def _busy(prometheus: Prometheus, expression: str) -> bool:
    return float(prometheus.query(expression)[0]["value"][1]) > 0.2


def test_the_load_is_what_the_server_is_for(prometheus: Prometheus) -> None:
    """A panel of zeros would prove nothing."""
    shown = ("Cache hit rate", "Acceptance rate", "Tokens per step", "Speed-up", "Tokens saved per second")
    for title in shown:
        (target,) = PANELS[title]["targets"]
        eventually(partial(_busy, prometheus, chosen(target["expr"])), title)


@pytest.mark.parametrize("variable", [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"])
def test_variables_offer_what_there_is(prometheus: Prometheus, loaded: Server, variable: dict[str, Any]) -> None:
    asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert asked is not None
    metric, label = asked.groups()
    expected = {"job": "histospec", "instance": loaded.http, "run": "run"}[label]
    eventually(lambda: prometheus.ask(f"label/{label}/values", **{"match[]": chosen(metric)}) == [expected])


def test_alert_rules_are_evaluated_without_errors_and_a_server_that_is_well_fires_none(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert rules()
    assert {rule["name"]: rule.get("lastError", "") for rule in rules() if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_metrics_have_the_names_and_texts_that_prometheus_wants(loaded: Server) -> None:
    status, text = loaded.get("/metrics")
    assert status == 200
    ran = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_grafana_knows_every_field(tmp_path: Path) -> None:
    (tmp_path / "dashboard.ts").write_text(TYPES % json.dumps(DASHBOARD))
    packages = ["@grafana/schema@13", "typescript@5"]
    install = [program("npm"), "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *packages]
    if subprocess.run(install, capture_output=True, timeout=300).returncode:
        pytest.skip("npm cannot install Grafana's types: no registry")
    compiler = tmp_path / "node_modules" / ".bin" / "tsc"
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
    ran = subprocess.run(
        [str(compiler), *options, "dashboard.ts"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs a vLLM build in the environment")
def test_the_demo_leaves_no_panel_empty(tmp_path: Path) -> None:
    shown = {(title, target["expr"]) for title, panel in PANELS.items() for target in panel["targets"]}
    empty = {(title, expression) for title, expression in shown if TWINS not in expression}
    said = tmp_path / "said"
    command = [sys.executable, "-m", "examples.tiny_rl.run", "--quick", "--out", str(tmp_path / "demo")]
    with said.open("w") as output, subprocess.Popen(command, stdout=output, cwd=ROOT) as demo:
        with Prometheus(tmp_path, [_scraped(said, demo)], RULES) as prometheus:
            while demo.poll() is None:
                empty = {one for one in empty if not samples(prometheus, one[1])}
                time.sleep(EVERY)
        assert demo.returncode == 0, said.read_text()
    assert empty == set()


def _scraped(said: Path, demo: "subprocess.Popen[bytes]") -> str:
    """Returns the HTTP address of the demo's server, which the demo prints first."""
    while demo.poll() is None:
        if found := re.search(r"http://([\w.:]+)/metrics", said.read_text().replace("\n", "")):
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"the demo ended at once: {said.read_text()}")
