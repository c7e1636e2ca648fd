"""The control plane that tests of the chart share, with additional resource kinds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.control_plane import ControlPlane
from tests.support.fake_nodes import FakeNodes

OPERATOR = "monitoring.coreos.com"

asked_for = pytest.mark.skipif(
    os.environ.get("HISTOSPEC_TEST_CLUSTER") != "1", reason="takes minutes: make test-cluster"
)


class Cluster:
    """plane: the processes. nodes: where its pods run. api: as an administrator."""

    def __init__(self, plane: ControlPlane, nodes: FakeNodes) -> None:
        self.plane, self.nodes, self.api = plane, nodes, plane.api


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster that has the kinds of the Prometheus operator."""
    plane = ControlPlane(folder).start()
    nodes = FakeNodes(plane.api)
    try:
        for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
            plane.api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", _definition(kind))
        yield Cluster(plane, nodes.start())
    finally:
        nodes.stop()
        plane.stop()


def _definition(kind: str) -> dict[str, object]:
    """Of a kind of the Prometheus operator, whatever its fields; test_chart.py checks those."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{OPERATOR}"},
        "spec": {
            "group": OPERATOR,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
