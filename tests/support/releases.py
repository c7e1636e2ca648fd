"""A release of the chart in a real control plane: helm's commands, and the resulting objects."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.charts import CHART, RELEASE, Manifest, pod_of, render
from tests.support.control_plane import Cluster
from tests.support.fake_nodes import references
from tests.support.kubernetes_api import Object, Refused
from tests.support.programs import PLANE, program
from tests.support.waiting import eventually

HELMS = ("3.6", "3.18", "4.1")
"""Versions of helm that the chart is tried with. The first is that of build/tools."""
NEWEST_3 = "3.18"
WAIT = ("--wait", "--timeout", "4m")
SHARDS = "app.kubernetes.io/component=shard"
MADE_UP = "made-up"


def helm_program(version: str) -> str:
    """The path of a version of helm; skips the test where it is not installed."""
    if version == HELMS[0]:
        return program("helm")
    path = PLANE / f"helm-{version}"
    if not path.exists():
        pytest.skip(f"needs {path.name}, see scripts/install-control-plane")
    return str(path)


class Release:
    """The chart in a namespace of its own. words: values, as options of helm. level: of Pod Security, enforced."""

    def __init__(
        self, cluster: Cluster, namespace: str, *words: object, level: str = "restricted", helm: str = NEWEST_3
    ) -> None:
        self.api = cluster.api
        self.namespace = namespace
        self._words = words
        self._kubeconfig = cluster.plane.kubeconfig
        self._program = helm_program(helm)
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn")}
        # Not _make: a namespace that is there would have other labels.
        self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        eventually(lambda: self.api.exists(account), "no service account")

    def rendered(self, *more: object) -> list[Manifest]:
        return render("--namespace", self.namespace, *self._words, *more)

    def prepare(self) -> None:
        """Makes the Secrets, ConfigMaps, service account, priority and runtime that users bring themselves."""
        manifests = self.rendered()
        own = {manifest["metadata"]["name"] for manifest in manifests}
        accounts = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ServiceAccount"}
        wanted: dict[tuple[str, str], dict[str, str]] = {}
        for spec in filter(None, map(pod_of, manifests)):
            for resource, name, keys in references(spec):
                if name not in own and resource != "persistentvolumeclaims":
                    wanted.setdefault((resource, name), {}).update(dict.fromkeys(keys or ["token"], MADE_UP))
            if "priorityClassName" in spec:
                priority = {"metadata": {"name": spec["priorityClassName"]}, "value": 1000}
                self._make("/apis/scheduling.k8s.io/v1/priorityclasses", priority)
            if "runtimeClassName" in spec:
                runtime = {"metadata": {"name": spec["runtimeClassName"]}, "handler": "runc"}
                self._make("/apis/node.k8s.io/v1/runtimeclasses", runtime)
            if spec.get("serviceAccountName", "default") not in {"default", *accounts}:
                account = {"metadata": {"name": spec["serviceAccountName"]}}
                self._make(f"/api/v1/namespaces/{self.namespace}/serviceaccounts", account)
        for (resource, name), content in wanted.items():
            made = {"metadata": {"name": name}, "stringData" if resource == "secrets" else "data": content}
            self._make(f"/api/v1/namespaces/{self.namespace}/{resource}", made)

    def helm(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Runs helm in the namespace; also where it fails."""
        command = [
            self._program,
            *map(str, words),
            "--namespace",
            self.namespace,
            "--kubeconfig",
            str(self._kubeconfig),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    def does(self, *words: object) -> str:
        """Runs helm, which must succeed. -> what it printed"""
        done = self.helm(*words)
        assert done.returncode == 0, f"helm {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, *more: object) -> str:
        """Installs. -> the notes; whether pods become ready is not waited for."""
        return self.does("install", RELEASE, CHART, *self._words, *more)

    def install(self, *more: object) -> str:
        """-> the notes, after all pods are ready."""
        notes = self.does("install", RELEASE, CHART, *self._words, *more, *WAIT)
        eventually(self.is_settled, "the shards of the installation are not ready")
        return notes

    def installed(self) -> "Release":
        """The same, after all pods are ready."""
        self.install()
        return self

    def upgrade(self, *more: object) -> str:
        """To the same values and some more. -> the notes, after all pods are of this revision, and ready."""
        notes = self.does("upgrade", RELEASE, CHART, *self._words, *more, *WAIT)
        eventually(self.is_settled, "the shards of the upgrade are not ready")
        return notes

    def roll_back(self) -> None:
        """To the first revision; returns when all pods are of it, and ready."""
        self.does("rollback", RELEASE, "1", *WAIT)
        eventually(self.is_settled, "the shards of the first revision are not back")

    def rolls(self) -> bool:
        """Whether an upgrade replaces all pods, or leaves that to people, wholly or in part."""
        strategy = self.workload()["spec"]["updateStrategy"]
        return strategy["type"] == "RollingUpdate" and not strategy.get("rollingUpdate", {}).get("partition")

    def is_settled(self) -> bool:
        """Whether all shards are there and ready, and of the latest revision where the release rolls.

        Old versions of helm wait for less.
        """
        workload = self.workload()
        spec, status = workload["spec"], workload["status"]
        if status.get("observedGeneration") != workload["metadata"]["generation"]:
            return False
        if "replicas" not in spec:
            counts = [status["desiredNumberScheduled"], status["numberReady"]]
            counts += [status.get("updatedNumberScheduled")] if self.rolls() else []
            return len(set(counts)) == 1
        # A StatefulSet leaves out what is 0.
        counts = [status.get(of, 0) for of in ("replicas", "readyReplicas")]
        latest = status.get("currentRevision") == status.get("updateRevision") or not self.rolls()
        return latest and counts == [spec["replicas"]] * 2

    def refuses(self, *more: object) -> str:
        """An upgrade that must fail. -> what helm said"""
        done = self.helm("upgrade", RELEASE, CHART, *self._words, *more)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def objects(self, kind: str, **query: str) -> list[Object]:
        """Objects of the namespace by what they are called in addresses, such as pods or apps/statefulsets."""
        group, _, plural = kind.rpartition("/")
        root = f"/apis/{group}/v1" if group else "/api/v1"
        return self.api.items(f"{root}/namespaces/{self.namespace}/{plural}", **query)

    def shards(self) -> dict[str, str]:
        """The uid of each ready pod by its name."""
        pods = self.objects("pods", labelSelector=SHARDS)
        ready = [p for p in pods if {"type": "Ready", "status": "True"}.items() <= condition(p, "Ready").items()]
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in ready
            if "deletionTimestamp" not in pod["metadata"]
        }

    def workload(self) -> Object:
        (found,) = [*self.objects("apps/statefulsets"), *self.objects("apps/daemonsets")]
        return found

    def delete_workload(self, *, orphan: bool) -> None:
        """Deletes the StatefulSet, as `kubectl delete` does. orphan: its pods stay; else waits until they are gone."""
        path = f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/{self.workload()['metadata']['name']}"
        policy = "Orphan" if orphan else "Background"
        self.api.call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy})
        eventually(lambda: not self.objects("apps/statefulsets"), "the StatefulSet is still there")
        if not orphan:
            eventually(lambda: not self.objects("pods", labelSelector=SHARDS), "its pods are still there")

    def options(self) -> str:
        """The configuration file that the shards read."""
        (name,) = [
            v["configMap"]["name"] for v in self.workload()["spec"]["template"]["spec"]["volumes"] if "configMap" in v
        ]
        (found,) = [c for c in self.objects("configmaps") if c["metadata"]["name"] == name]
        return str(found["data"]["histospec.toml"])

    def claims(self) -> dict[str, str]:
        """The volume of each bound claim by the claim's name."""
        return {c["metadata"]["name"]: c["spec"]["volumeName"] for c in self.objects("persistentvolumeclaims")
                if c["status"].get("phase") == "Bound"}  # fmt: skip

    def left(self, kinds: list[Manifest]) -> set[str]:
        """Which objects of these kinds the release has left, after it is removed: "Secret run-histospec-tokens"."""
        paths = {
            f"{m['kind']} {m['metadata']['name']}": f"{self.api.collection(m, self.namespace)}/{m['metadata']['name']}"
            for m in kinds
        }
        return {name for name, path in paths.items() if self.api.exists(path)}

    def _make(self, path: str, content: Object) -> None:
        try:
            self.api.call("POST", path, content)
        except Refused as error:
            if error.status != 409:  # it is there
                raise


def condition(pod: Object, kind: str) -> Object:
    """A condition of a pod; {} where it has none of this kind."""
    found: list[Object] = [c for c in pod["status"].get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


def values_of(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text()) or {}
