"""Nodes without machines: in the API server, pods that the scheduler assigns to them run, become ready and end.

They also replace a provisioner of volumes and a cloud's load balancer. A pod waits, as with a kubelet, while a Secret,
ConfigMap, key or claim that it refers to is missing. Pods execute nothing: probes pass, and a pod that should end has
succeeded.
"""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from tests.support.kubernetes_api import Api, Object, Refused

PAUSE = 0.1
"""Seconds between looks at the pods."""
LEASE = 10.0
"""Seconds between signs of life of a node; the controller manager misses them after 40."""
LABELS = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "pool": "cpu"}
PROVISIONER = "tests.histospec.dev/folders"


class FakeNodes:
    """A thread that is the kubelet of `node-0`, `node-1` and so on. waiting: why pods do not start, by their names."""

    def __init__(self, api: Api, count: int = 3) -> None:
        self.names = [f"node-{i}" for i in range(count)]
        self.waiting: dict[str, str] = {}
        self._api = api
        self._ended = threading.Event()
        self._turn = threading.Lock()
        self._addresses = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "FakeNodes":
        """Joins the cluster, with a default storage class."""
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        storage = {"metadata": {"name": "folders", "annotations": default}, "allowVolumeExpansion": True}
        self._api.call("POST", "/apis/storage.k8s.io/v1/storageclasses", {**storage, "provisioner": PROVISIONER})
        for name in self.names:
            labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": f"zone-of-{name}", **LABELS}
            self._api.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
            self._live(name)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the thread; the nodes are lost."""
        self._ended.set()
        self._thread.join(60)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, no pod starts or ends."""
        with self._turn:
            yield

    def _run(self) -> None:
        looks = 0
        while not self._ended.wait(PAUSE):
            with self._turn:
                for claim in self._api.items("/api/v1/persistentvolumeclaims"):
                    if claim["status"].get("phase") == "Pending":
                        self._quietly(self._provide, claim)
                for service in self._api.items("/api/v1/services"):
                    if service["spec"]["type"] == "LoadBalancer" and not service["status"]["loadBalancer"]:
                        self._quietly(self._expose, service)
                for pod in self._api.items("/api/v1/pods"):
                    if pod["spec"].get("nodeName") in self.names:
                        self._quietly(self._look_after, pod)
                if looks % (LEASE / PAUSE) == 0:
                    for name in self.names:
                        self._live(name)
            looks += 1

    def _quietly(self, work: Any, item: Object) -> None:
        """Lets the next look try again where an object has changed or gone meanwhile."""
        try:
            work(item)
        except Refused as error:
            if error.status not in (404, 409):
                raise

    def _live(self, name: str) -> None:
        capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "8"}
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "lastHeartbeatTime": _now()}
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
        self._api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def _provide(self, claim: Object) -> None:
        """Makes the volume that a claim asks for; the controller manager binds the two."""
        name, namespace = claim["metadata"]["name"], claim["metadata"]["namespace"]
        wanted = claim["spec"]
        spec = {
            "capacity": wanted["resources"]["requests"],
            "accessModes": wanted["accessModes"],
            "storageClassName": wanted.get("storageClassName", ""),
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/var/{namespace}/{name}"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "name": name,
                "namespace": namespace,
                "uid": claim["metadata"]["uid"],
            },
        }
        # A claim that comes back gets a new volume.
        volume = {"metadata": {"name": f"{namespace}-{name}-{claim['metadata']['uid'][:8]}"}, "spec": spec}
        self._api.call("POST", "/api/v1/persistentvolumes", volume)

    def _expose(self, service: Object) -> None:
        path = f"/api/v1/namespaces/{service['metadata']['namespace']}/services/{service['metadata']['name']}"
        self._api.call("PATCH", f"{path}/status", {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.3"}]}}})

    def _look_after(self, pod: Object) -> None:
        meta, phase = pod["metadata"], pod["status"].get("phase")
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if "deletionTimestamp" in meta:
            self._api.call("DELETE", path, {"gracePeriodSeconds": 0})
        elif phase == "Pending":
            missing = self._missing(pod)
            if missing:
                self.waiting[meta["name"]] = missing
            else:
                self.waiting.pop(meta["name"], None)
                self._api.call("PATCH", f"{path}/status", {"status": self._begun(pod)})

    def _begun(self, pod: Object) -> Object:
        ends = pod["spec"]["restartPolicy"] != "Always"
        self._addresses += 1
        address = f"10.244.{self._addresses // 250}.{self._addresses % 250 + 1}"
        now = _now()
        state = {"terminated": {"exitCode": 0, "startedAt": now, "finishedAt": now}} if ends else {}
        common = {"imageID": "", "restartCount": 0, "ready": not ends, "started": not ends}
        containers = [
            {"name": c["name"], "image": c["image"], "state": state or {"running": {"startedAt": now}}, **common}
            for c in pod["spec"]["containers"]
        ]
        kinds = ["Initialized", "PodReadyToStartContainers", *([] if ends else ["ContainersReady", "Ready"])]
        return {
            "phase": "Succeeded" if ends else "Running",
            "startTime": now,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "containerStatuses": containers,
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
        }

    def _missing(self, pod: Object) -> str:
        """What a kubelet would wait for; "" where everything is there."""
        for kind, name, keys in references(pod["spec"]):
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/{kind}/{name}"
            if not self._api.exists(path):
                return f"no {name} in {kind}"
            there = self._api.get(path).get("data", {})
            if kind == "secrets":
                there = {key: base64.b64decode(value) for key, value in there.items()}
            for key in keys:
                if not there.get(key):
                    return f"{name} in {kind} has no {key}"
        return ""


def references(spec: Object) -> list[tuple[str, str, list[str]]]:
    """What a pod cannot start without. -> (resource, such as secrets; name; keys)."""
    found = []
    volumes = [s for v in spec.get("volumes", []) for s in v.get("projected", {}).get("sources", [v])]
    for volume in volumes:
        for source, resource, name in (("secret", "secrets", "secretName"), ("configMap", "configmaps", "name")):
            given = volume.get(source)
            if given and not given.get("optional"):
                keys = [item["key"] for item in given.get("items", [])]
                found.append((resource, given.get(name) or given["name"], keys))
        if "persistentVolumeClaim" in volume:
            found.append(("persistentvolumeclaims", volume["persistentVolumeClaim"]["claimName"], []))
    for container in spec["containers"]:
        for variable in container.get("env", []):
            for source, resource in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
                given = variable.get("valueFrom", {}).get(source)
                if given and not given.get("optional"):
                    found.append((resource, given["name"], [given["key"]]))
        for whole in container.get("envFrom", []):
            for source, resource in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
                if source in whole and not whole[source].get("optional"):
                    found.append((resource, whole[source]["name"], []))
    return found


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
