"""A real Prometheus that scrapes real servers every second."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.charts import NAMESPACE
from tests.support.ports import free_port
from tests.support.waiting import eventually

Job = dict[str, Any]
"""A scrape configuration."""


def require(program: str, where: str = "scripts/install-tools") -> None:
    """Skips the test where a program is absent."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed ({where})")


def promtool(*arguments: str) -> None:
    """Runs promtool, and fails with what it says where it fails; skips the test where it is absent."""
    require("promtool")
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)
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
    """A process that scrapes and evaluates rules; `close` ends it.

    targets: "host:port" of each server, a scrape configuration, or several. rules: a file of rules.
    """

    def __init__(self, directory: Path, targets: Iterable[str | Job] | Job, rules: Path) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        given: list[str | Job] = [targets] if isinstance(targets, dict) else [*targets]
        jobs = [job for job in given if isinstance(job, dict)]
        if not jobs:
            jobs = [{"job_name": "histospec", "static_configs": [{"targets": given}]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": jobs,
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
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

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
