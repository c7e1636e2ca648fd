"""A Kubernetes API server in memory with what Helm needs: objects by their path, discovery, merge patches.

It admits and runs nothing: what a real control plane says of the chart is `make test-cluster`.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from tests.support.programs import program

Object = dict[str, Any]
VERSION = {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
# What a release of the chart consists of, by group and version: plural and kind.
RESOURCES = {
    "v1": {
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
        "configmaps": "ConfigMap",
        "pods": "Pod",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"statefulsets": "StatefulSet", "daemonsets": "DaemonSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "batch/v1": {"cronjobs": "CronJob", "jobs": "Job"},
}


class Cluster:
    """The objects of a cluster, and a Helm that speaks to it."""

    def __init__(self, home: Path, port: int, objects: dict[str, Object]) -> None:
        self._objects = objects
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "users": [{"name": "it", "user": {}}],
        }  # fmt: skip
        (home / "kubeconfig").write_text(json.dumps(config))
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": str(home / "kubeconfig")}

    def helm(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Runs helm; also where it fails."""
        command = [program("helm"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=self._environment)

    def claim(self, name: str) -> Object:
        """Makes a claim for a volume, as a StatefulSet's controller does for each shard. -> the claim"""
        path = f"/api/v1/namespaces/rl/persistentvolumeclaims/{name}"
        made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "rl"}}
        return self._objects.setdefault(path, made)

    def remove(self, kind: str) -> None:
        """Removes all objects of a kind, as `kubectl delete` does."""
        for path in [path for path, o in self._objects.items() if o["kind"] == kind]:
            del self._objects[path]

    def objects(self, kind: str) -> dict[str, Object]:
        """The objects of a kind by name, but not what Helm itself remembers."""
        found = {o["metadata"]["name"]: o for o in list(self._objects.values()) if o["kind"] == kind}
        return {name: o for name, o in found.items() if not str(o.get("type", "")).startswith("helm.sh/")}


@contextmanager
def cluster(home: Path) -> Iterator[Cluster]:
    """A cluster without objects; ends with the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.objects = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Cluster(home, server.server_port, server.objects)  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def merged(before: object, patch: object) -> object:
    """A JSON merge patch (RFC 7386), applied; directives of strategic patches are left out, lists replaced."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif not key.startswith("$"):
            result[key] = merged(result.get(key), value)
    return result


class _Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    @property
    def _objects(self) -> dict[str, Object]:
        return cast(dict[str, Object], self.server.objects)  # type: ignore[attr-defined]

    def _answer(self, status: int, value: Object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self) -> None:
        self._answer(404, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 404,
                           "reason": "NotFound", "message": f"{self.path} not found"})  # fmt: skip

    def _body(self) -> Object:
        return cast(Object, json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

    def _stored(self, path: str, value: Object, status: int) -> None:
        value["metadata"] = {"namespace": "rl", "uid": path, "resourceVersion": "1"} | value["metadata"]
        self._objects[path] = value
        self._answer(status, value)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = url.path.rstrip("/")
        if (found := _discovery(path)) is not None:
            self._answer(200, found)
        elif path in self._objects:
            self._answer(200, self._objects[path])
        elif _kind(path):
            wanted = dict(
                pair.split("=") for pair in parse_qs(url.query).get("labelSelector", [""])[0].split(",") if pair
            )
            items = [
                value for key, value in sorted(self._objects.items())
                if key.startswith(f"{path}/") and wanted.items() <= value["metadata"].get("labels", {}).items()
            ]  # fmt: skip
            self._answer(200, {"apiVersion": "v1", "kind": f"{_kind(path)}List", "metadata": {}, "items": items})
        else:
            self._missing()

    def do_POST(self) -> None:
        value = self._body()
        self._stored(f"{urlsplit(self.path).path}/{value['metadata']['name']}", value, 201)

    def do_PUT(self) -> None:
        self._stored(urlsplit(self.path).path, self._body(), 200)

    def do_PATCH(self) -> None:
        path = urlsplit(self.path).path
        self._stored(path, cast(Object, merged(self._objects[path], self._body())), 200)

    def do_DELETE(self) -> None:
        self._body()
        if self._objects.pop(urlsplit(self.path).path, None) is None:
            self._missing()
        else:
            self._answer(200, {"apiVersion": "v1", "kind": "Status", "status": "Success"})


def _kind(path: str) -> str:
    """The kind of a list's objects; nothing where the path is no list."""
    plural = path.rpartition("/")[2]
    return next((plurals[plural] for plurals in RESOURCES.values() if plural in plurals), "")


def _discovery(path: str) -> Object | None:
    """What the server says of itself at a path, if it is one of those."""
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": group, "version": group.rpartition("/")[2]} for group in RESOURCES if "/" in group]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
            {"name": entry["groupVersion"].partition("/")[0], "versions": [entry], "preferredVersion": entry}
            for entry in versions
        ]}  # fmt: skip
    for group, plurals in RESOURCES.items():
        if path == ("/apis/" if "/" in group else "/api/") + group:
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [
                {"name": plural, "singularName": "", "namespaced": True, "kind": kind,
                 "verbs": ["create", "delete", "get", "list", "patch", "update"]}
                for plural, kind in plurals.items()
            ]}  # fmt: skip
    return None
