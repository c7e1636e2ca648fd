"""The examples of deploy/kubernetes/examples and of the pages, for the release `histospec` in the namespace `rl`."""

import shlex
from collections.abc import Iterator
from typing import Any

from tests.support.charts import NAMESPACE, Manifest, objects_in, one, render
from tests.support.programs import ROOT

FOLDER = ROOT / "deploy" / "kubernetes" / "examples"
NAMED = ("--set", "fullnameOverride=histospec")
"""Values that name a release's objects as the release `histospec` does."""

Pod = dict[str, Any]


def example(name: str) -> list[Manifest]:
    return objects_in((FOLDER / name).read_text())


def rayjob() -> Manifest:
    """The spec of the RayJob."""
    return dict(one(example("verl-rayjob.yaml"), "RayJob")["spec"])


def ray_pods() -> Iterator[tuple[str, Manifest]]:
    """The templates of the pods of the RayJob, by the name of their group."""
    cluster = rayjob()["rayClusterSpec"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def worker_pods() -> Iterator[tuple[str, Pod]]:
    """The spec of every pod of the examples that gets drafts from the release's Service."""
    yield "vllm.yaml", one(example("vllm.yaml"), "Deployment")["spec"]["template"]["spec"]
    for group, template in ray_pods():
        yield f"verl-rayjob.yaml, {group}", template["spec"]


def verl_overrides() -> list[str]:
    return [word for word in shlex.split(rayjob()["entrypoint"]) if "=" in word]


def vllm_arguments(name: str) -> list[str]:
    """The arguments of the container `vllm` in an example of a Pod or a Deployment."""
    (spec,) = [m["spec"] for m in example(name) if m["kind"] in ("Pod", "Deployment")]
    spec = spec.get("template", {"spec": spec})["spec"]
    (found,) = [container["args"] for container in spec["containers"] if container["name"] == "vllm"]
    return list(found)


def scrape_targets() -> dict[str, list[dict[str, str]]]:
    """By pod of the release and of the Deployment, the labels that Prometheus' discovery gives each of its ports."""
    shards = one(render(*NAMED), "StatefulSet")
    workers = one(example("vllm.yaml"), "Deployment")
    return {f"{found['metadata']['name']}-0": list(_ports(found)) for found in (shards, workers)}


def _ports(workload: Manifest) -> Iterator[dict[str, str]]:
    template, meta = workload["spec"]["template"], "__meta_kubernetes_"
    labels = {f"{meta}pod_label_{_sane(key)}": str(value) for key, value in template["metadata"]["labels"].items()}
    labels |= {f"{meta}namespace": NAMESPACE, f"{meta}pod_name": f"{workload['metadata']['name']}-0"}
    for container in template["spec"]["containers"]:
        for port in container["ports"]:
            yield labels | {f"{meta}pod_container_port_name": port["name"]}


def _sane(label: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in label)
