"""A real Prometheus that scrapes real servers every second; the rules and the dashboard for it."""

import json
import math
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.charts import NAMESPACE
from tests.support.ports import free_port
from tests.support.programs import ROOT, program
from tests.support.waiting import eventually

RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "histospec.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}
CHOSEN = {"$job": ".*", "$instance": ".*", "$run": ".*", "$__rate_interval": "10s"}

Job = dict[str, Any]
"""A scrape configuration."""


def promtool(*arguments: str) -> None:
    """Runs promtool, and fails with what it says where it fails; skips the test where it is absent."""
    ran = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def as_the_operator_does(
    monitor: dict[str, Any], pods: Mapping[str, str], *, override_honor_labels: bool = False
) -> dict[str, Any]:
    """The scrape configuration that the Prometheus operator makes of a ServiceMonitor.

    Each target has labels of its pod and Service, which the operator reads from Kubernetes; then come the relabelings.

    monitor: the manifest, with one endpoint.
    pods: "host:port" by the name of the pod.
    override_honor_labels: as `overrideHonorLabels` of the Prometheus object, which wins over the ServiceMonitor.
    """
    (endpoint,) = monitor["spec"]["endpoints"]
    service = f"{monitor['metadata']['name']}-headless"
    labels = {"namespace": NAMESPACE, "service": service, "job": service, "container": "histospec", "endpoint": "http"}
    return {
        "job_name": f"serviceMonitor/{NAMESPACE}/{monitor['metadata']['name']}/0",
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False) and not override_honor_labels,
        "static_configs": [{"targets": [at], "labels": labels | {"pod": pod}} for pod, at in pods.items()],
        "relabel_configs": [
            {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key): value for key, value in relabeling.items()}
            for relabeling in endpoint["relabelings"]
        ],
    }


class Prometheus:
    """A process that scrapes and evaluates rules; a context, with whose end it ends.

    targets: "host:port" of each server, a scrape configuration, or several. rules: a file of rules.
    """

    def __init__(self, directory: Path, targets: Iterable[str | Job] | Job, rules: Path | None = None) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        given: list[str | Job] = [targets] if isinstance(targets, dict) else [*targets]
        jobs = [job for job in given if isinstance(job, dict)]
        if not jobs:
            jobs = [{"job_name": "histospec", "static_configs": [{"targets": given}]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": jobs,
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )
        eventually(self._scrapes, "Prometheus scrapes nothing")

    def _scrapes(self) -> bool:
        try:
            return bool(self.query("up"))
        except (urllib.error.URLError, AssertionError):  # it does not listen yet, or says that it is starting
            assert self._process.poll() is None, "Prometheus ended"
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression yields now: dicts of `metric` (labels) and `value` ([time, text])."""
        result = self.ask("query", query=expression)["result"]
        assert isinstance(result, list)
        return result

    def ask(self, page: str, **parameters: str) -> Any:
        """The data of a page of its HTTP API. Fails where it answers with an error."""
        address = f"http://{self._address}/api/v1/{page}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def chosen(text: str, **values: str) -> str:
    """An expression with every variable of the dashboard set; to All where `values` does not name it."""
    for name, value in (CHOSEN | {f"${name}": value for name, value in values.items()}).items():
        text = text.replace(name, value)
    return text


def samples(prometheus: Prometheus, expression: str, **values: str) -> list[dict[str, Any]]:
    """What an expression yields now, as `Prometheus.query`, without what is not a number. `values`: see `chosen`."""
    return [s for s in prometheus.query(chosen(expression, **values)) if not math.isnan(float(s["value"][1]))]
