"""Nodes of a real control plane that run their pods: each `histospec` command is a process of this machine.

A pod has an address of its own on loopback, and a folder for each of its volumes; a claim's folder lives as long as
the claim. A shard is ready when its /readyz says so, gets SIGTERM when it is deleted, and sees changed Secrets. A Job
ends as its command ends, and `kubectl logs` shows its output. There is no DNS: a command that names the Service gets
the addresses of the shards.
"""

import base64
import copy
import os
import random
import re
import signal
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

from tests.support.children import Child, histospec
from tests.support.fake_nodes import FakeNodes
from tests.support.kubernetes_api import Api, Object

SHARDS = "app.kubernetes.io/component=shard"


@dataclass
class Running:
    """A pod that runs. best: its status once it is ready, or has succeeded. mounts: its folders by their paths."""

    namespace: str
    name: str
    host: str
    best: Object
    mounts: dict[str, Path]
    process: Child
    told: Object | None = None
    ending: bool = False

    def news(self) -> Object | None:
        """The status of the pod if it has changed."""
        status = self._status()
        if status == self.told:
            return None
        self.told = status
        return status

    def log(self) -> str:
        """What the process has said, with the paths of the pod."""
        text = self.process.so_far()
        for path, folder in self.mounts.items():
            text = text.replace(str(folder), path)
        return text

    def has_ended(self) -> bool:
        """Sends SIGTERM at the first call. Whether the process has ended."""
        if not self.ending and self.process.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.ending = True
        return self.process.process.poll() is not None

    def _status(self) -> Object:
        status = copy.deepcopy(self.best)
        container, code = status["containerStatuses"][0], self.process.process.poll()
        if "terminated" not in container["state"]:
            ready = code is None and not self.ending and self._answers()
            container["ready"] = container["started"] = ready
            for condition in status["conditions"]:
                condition["status"] = str(ready or condition["type"] not in ("ContainersReady", "Ready"))
        elif code is None:
            container["state"] = {"running": {"startedAt": status["startTime"]}}
            status["phase"] = "Running"
        elif code:
            container["state"]["terminated"]["exitCode"] = code
            status["phase"] = "Failed"
        return status

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.host}:9464/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class RunningNodes(FakeNodes):
    """folder: for the volumes of pods."""

    def __init__(self, api: Api, folder: Path) -> None:
        super().__init__(api)
        self.pods: list[Running] = []
        self._folder = folder
        self._by_uid: dict[str, Running] = {}
        self._network = f"127.{random.randrange(64, 255)}.{random.randrange(256)}"
        self._hosts: dict[str, str] = {}
        self._kubelet = _Kubelet(self)

    def stop(self) -> None:
        super().stop()
        self._kubelet.close()
        for pod in self.pods:
            with pod.process:
                pass

    def endpoint(self, namespace: str) -> str:
        """The shards of a namespace, as clients on this machine name them."""
        shards = self._api.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=SHARDS)
        names = sorted(pod["metadata"]["name"] for pod in shards)
        return ",".join(f"{name}={self._host(namespace, name)}:6378" for name in names)

    def _host(self, namespace: str, name: str) -> str:
        return self._hosts.setdefault(f"{namespace}/{name}", f"{self._network}.{len(self._hosts) + 1}")

    def _live(self, name: str) -> None:
        super()._live(name)
        kubelet = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._kubelet.port}},
        }
        self._api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": kubelet})

    def _look_after(self, pod: Object) -> None:
        meta = pod["metadata"]
        running = self._by_uid.get(meta["uid"])
        if running is None or ("deletionTimestamp" in meta and running.has_ended()):
            super()._look_after(pod)
        elif "deletionTimestamp" not in meta:
            self._mount(pod)
            if (status := running.news()) is not None:
                path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
                self._api.call("PATCH", f"{path}/status", {"status": status})

    def _begun(self, pod: Object) -> Object:
        meta, (container,) = pod["metadata"], pod["spec"]["containers"]
        mounts, host = self._mount(pod), self._host(meta["namespace"], meta["name"])
        words = [_here(word, mounts, host) for word in container["args"]]
        words = [re.sub(r"discover://[\w.-]+:6378", self.endpoint(meta["namespace"]), word) for word in words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HISTOSPEC_")}
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = {"metadata.name": meta["name"], "spec.nodeName": pod["spec"]["nodeName"]}.get(field)
            environment[variable["name"]] = value or variable["value"]
        process = histospec(*words, env=environment)
        running = Running(meta["namespace"], meta["name"], host, super()._begun(pod), mounts, process)
        self._by_uid[meta["uid"]] = running
        self.pods.append(running)
        return running.news() or {}

    def _mount(self, pod: Object) -> dict[str, Path]:
        """Writes Secrets and ConfigMaps as they are now. -> the folders of the volumes by their path in the pod"""
        meta, (container,) = pod["metadata"], pod["spec"]["containers"]
        folders = {volume["name"]: self._volume(meta, volume) for volume in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: folders[mount["name"]] for mount in container["volumeMounts"]}
        host = self._host(meta["namespace"], meta["name"])
        for volume in pod["spec"]["volumes"]:
            for name, content in self._content(meta["namespace"], volume).items():
                file = folders[volume["name"]] / name
                text = _here(content, mounts, host)
                if not file.exists() or file.read_text() != text:
                    file.with_suffix(".new").write_text(text)
                    file.with_suffix(".new").rename(file)
        return mounts

    def _volume(self, meta: Object, volume: Object) -> Path:
        folder = self._folder / str(meta["uid"]) / str(volume["name"])
        if claim := volume.get("persistentVolumeClaim"):
            path = f"/api/v1/namespaces/{meta['namespace']}/persistentvolumeclaims/{claim['claimName']}"
            folder = self._folder / str(self._api.get(path)["metadata"]["uid"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _content(self, namespace: str, volume: Object) -> dict[str, str]:
        """The files of a volume from a Secret or ConfigMap."""
        if source := volume.get("secret"):
            data = self._api.get(f"/api/v1/namespaces/{namespace}/secrets/{source['secretName']}")["data"]
            data = {key: base64.b64decode(value).decode() for key, value in data.items()}
        elif source := volume.get("configMap"):
            data = self._api.get(f"/api/v1/namespaces/{namespace}/configmaps/{source['name']}")["data"]
        else:
            return {}
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        return {item["path"]: data[item["key"]] for item in items}


def _here(text: str, mounts: dict[str, Path], host: str) -> str:
    """A text of a pod with this machine's folders and the address of the pod."""
    paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    text = re.sub(rf'(?<![\w./-])({paths})(?=["/]|$)', lambda found: str(mounts[found[1]]), text)
    return text.replace("0.0.0.0:", f"{host}:")


class _Kubelet:
    """What `kubectl logs` asks a node for."""

    def __init__(self, nodes: RunningNodes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                _, _, namespace, name, _ = self.path.partition("?")[0].split("/")
                found = [pod for pod in nodes.pods if (pod.namespace, pod.name) == (namespace, name)]
                text = found[-1].log().encode() if found else b""
                self.send_response(200 if found else 404)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
