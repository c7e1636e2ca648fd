"""A real Kubernetes control plane on loopback: etcd, API server, controller manager and scheduler, and fake nodes.

Their programs are those of $KUBEBUILDER_ASSETS, of build/control-plane (scripts/install-control-plane), or of the PATH.
"""

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
import yaml

from tests.support.fake_nodes import FakeNodes
from tests.support.kubernetes_api import Api, Refused
from tests.support.ports import free_port
from tests.support.programs import program
from tests.support.waiting import eventually

OPERATORS = {
    "monitoring.coreos.com": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "cert-manager.io": ("Certificate",),
}
"""The kinds of operators, by their API group."""

asked_for = [
    pytest.mark.skipif(os.environ.get("HISTOSPEC_TEST_CLUSTER") != "1", reason="takes minutes: make test-cluster"),
    pytest.mark.timeout(1200),
]


class ControlPlane:
    """The processes. folder: their data, logs (one file each) and `kubeconfig`. api: as an administrator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._token = secrets.token_hex(16)
        self._port = free_port()
        self._write_secrets()
        self.api = Api(f"https://127.0.0.1:{self._port}", str(folder / "ca.crt"), self._token)

    def start(self) -> "ControlPlane":
        """Starts all of it; returns when the API server is ready."""
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the processes, those that depend on others first."""
        while self._processes:
            process = self._processes.pop()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def version(self) -> str:
        """Of Kubernetes, such as v1.33.1."""
        return str(self.api.get("/version")["gitVersion"])

    def log(self, name: str) -> str:
        """What a program has said last."""
        return (self.folder / f"{name}.log").read_text()[-4000:]

    def _start_all(self) -> None:
        folder, etcd, peer = self.folder, f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self._run(
            "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--listen-client-urls", etcd,
            "--advertise-client-urls", etcd, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}",
        )  # fmt: skip
        self._run(
            "kube-apiserver", "--etcd-servers", etcd, "--bind-address", "127.0.0.1", "--secure-port", self._port,
            # An address reserved for documentation, because the server refuses loopback.
            "--advertise-address", "192.0.2.1", "--endpoint-reconciler-type", "none",
            "--service-cluster-ip-range", "10.96.0.0/16", "--authorization-mode", "Node,RBAC",
            "--tls-cert-file", folder / "api.crt", "--tls-private-key-file", folder / "api.key",
            "--token-auth-file", folder / "tokens.csv", "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", folder / "accounts.key",
            "--service-account-signing-key-file", folder / "accounts.key",
        )  # fmt: skip
        eventually(lambda: self._is_ready(), f"no API server: {self.folder}/kube-apiserver.log")
        for name in ("kube-controller-manager", "kube-scheduler"):
            mine = ("--service-account-private-key-file", folder / "accounts.key", "--root-ca-file", folder / "ca.crt")
            self._run(
                name, "--kubeconfig", self.kubeconfig, "--leader-elect=false", "--bind-address", "127.0.0.1",
                "--secure-port", free_port(), *(mine if name == "kube-controller-manager" else ()),
            )  # fmt: skip
        eventually(lambda: self.api.exists("/api/v1/namespaces/default/serviceaccounts/default"), "no service account")

    def _run(self, name: str, *words: object) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [program(name), *map(str, words)]
            self._processes.append(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT))

    def _is_ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        try:
            return self.api.call("GET", "/version") is not None and self.api.exists("/api/v1/namespaces/kube-system")
        except (OSError, Refused):
            return False

    def _write_secrets(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.folder / "ca.crt")
        server = authority.issue_cert("127.0.0.1")
        server.cert_chain_pems[0].write_to_path(self.folder / "api.crt")
        server.private_key_pem.write_to_path(self.folder / "api.key")
        authority.issue_cert("accounts.invalid").private_key_pem.write_to_path(self.folder / "accounts.key")
        (self.folder / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        here = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(self.folder / "ca.crt")}
        self.kubeconfig.touch(0o600)  # helm warns of others' eyes
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": here}],
                    "users": [{"name": "admin", "user": {"token": self._token}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
                    "current-context": "here",
                }
            )
        )


class Cluster:
    """plane: the processes. nodes: where its pods run. api: as an administrator."""

    def __init__(self, plane: ControlPlane, nodes: FakeNodes) -> None:
        self.plane, self.nodes, self.api = plane, nodes, plane.api


@contextmanager
def running(folder: Path, nodes_of: Callable[[Api], FakeNodes] = FakeNodes) -> Iterator[Cluster]:
    """A cluster that has the kinds of the Prometheus operator and of cert-manager. nodes_of: makes its nodes."""
    plane = ControlPlane(folder).start()
    nodes = nodes_of(plane.api)
    try:
        for group, kinds in OPERATORS.items():
            for kind in kinds:
                definition = _definition(group, kind)
                plane.api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        yield Cluster(plane, nodes.start())
    finally:
        nodes.stop()
        plane.stop()


def _definition(group: str, kind: str) -> dict[str, object]:
    """Of a kind of an operator, whatever its fields; test_chart.py checks those."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
