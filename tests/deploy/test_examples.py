"""Kubernetes, KubeRay and Prometheus accept the examples, and the examples name what the chart makes."""

import copy
import json
import shlex
import subprocess
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

import pytest
import yaml

from histospec.client import DraftClient, Response
from histospec.protocol.names import DRAFT_SERVICE
from tests.support.charts import NAMESPACE, one, operator_takes, render
from tests.support.examples import (
    FOLDER,
    NAMED,
    example,
    ray_pods,
    rayjob,
    scrape_targets,
    verl_overrides,
)  # fmt: skip
from tests.support.programs import ROOT
from tests.support.prometheus import Prometheus
from tests.support.servers import Server
from tests.support.waiting import eventually

KUBERNETES = ("1.28", "1.30", "1.33")
MANIFESTS = (
    "sidecar.yaml", "vllm.yaml", "verl-rayjob.yaml", "podmonitor.yaml", "kueue.yaml", "keda.yaml", "grpcroute.yaml",
)  # fmt: skip
SCALED = ("--values", FOLDER / "values-autoscaling.yaml")
SCRAPE = ROOT / "deploy" / "prometheus" / "kubernetes.yaml"

Schema = dict[str, Any]
WHOLE: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
POD: Schema = {"type": "object", "required": ["spec"]}


def _fields(fields: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": fields, "required": list(required)}


GROUP = {"rayStartParams": TEXTS, "template": POD}
WORKERS = {"groupName": NAME, "replicas": WHOLE, "minReplicas": WHOLE, "maxReplicas": WHOLE}
CLUSTER = _fields(
    {
        "rayVersion": NAME,
        "headGroupSpec": _fields(GROUP, "template"),
        "workerGroupSpecs": {"type": "array", "items": _fields(GROUP | WORKERS, "template", *WORKERS)},
    },
    "headGroupSpec",
)
RAY_JOB = _fields(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": _fields(
            {
                "entrypoint": NAME,
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": WHOLE,
                "activeDeadlineSeconds": WHOLE,
                "backoffLimit": WHOLE,
                "runtimeEnvYAML": NAME,
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
                "rayClusterSpec": CLUSTER,
            },
            "entrypoint",
            "rayClusterSpec",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
"""The fields of a RayJob (ray.io/v1) that an example may use; every other field is refused.

The names and types are those of KubeRay 1.7. test_cluster_examples.py has a real API server check the example against
KubeRay's own definition. Pods are left out, since Kubernetes' schema describes them.
"""


QUANTITY: Schema = {"anyOf": [WHOLE, {"type": "string", "pattern": "^[0-9]+([KMGTPE]i)?$"}]}
PREEMPTION: Schema = {"enum": ["Never", "LowerPriority", "LowerOrNewerEqualPriority"]}
QUOTA = _fields({"name": NAME, "nominalQuota": QUANTITY}, "name", "nominalQuota")
FLAVOR = _fields({"name": NAME, "resources": {"type": "array", "items": QUOTA}}, "name", "resources")
QUOTAS = {
    "coveredResources": {"type": "array", "items": NAME},
    "flavors": {"type": "array", "items": FLAVOR},
}
KUEUE: dict[str, Schema] = {
    "ResourceFlavor": _fields({"nodeLabels": TEXTS}),
    "ClusterQueue": _fields(
        {
            "namespaceSelector": _fields({"matchLabels": TEXTS}),
            "preemption": _fields({"withinClusterQueue": PREEMPTION}),
            "resourceGroups": {"type": "array", "items": _fields(QUOTAS, *QUOTAS)},
        }
    ),
    "LocalQueue": _fields({"clusterQueue": NAME}),
}
"""By kind, the fields of a specification of Kueue 0.19 (kueue.x-k8s.io/v1beta2) that an example may use.

test_cluster_examples.py has a real API server check the example against Kueue's own definitions.
"""


def test_every_example_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*MANIFESTS, SCALED[1].name}


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_examples(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    manifests = [*example("sidecar.yaml"), *example("vllm.yaml")]
    for name, template in ray_pods():  # KubeRay makes pods of them
        manifests.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **template})
    assert [manifest["kind"] for manifest in manifests] == ["Pod", "Deployment", "Service", "Pod", "Pod"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    one(manifests, "Deployment")["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(one(manifests, "Deployment"), version, strict=True)


def test_kuberay_takes_the_job() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="comes with kubernetes-validate")
    (job,) = example("verl-rayjob.yaml")
    jsonschema.validate(job, RAY_JOB)
    for path, value in ((("rayClusterSpec", "headGroup"), {}), (("ttlSecondsAfterFinished",), "600")):
        wrong = copy.deepcopy(job)
        at = wrong["spec"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, RAY_JOB)


def test_kueue_takes_the_queue() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="comes with kubernetes-validate")
    manifests = example("kueue.yaml")
    assert [manifest["kind"] for manifest in manifests] == list(KUEUE)
    for manifest in manifests:
        assert manifest["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        jsonschema.validate(manifest["spec"], KUEUE[manifest["kind"]])
    one(manifests, "ClusterQueue")["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["quota"] = 1
    with pytest.raises(jsonschema.ValidationError, match="quota"):
        jsonschema.validate(one(manifests, "ClusterQueue")["spec"], KUEUE["ClusterQueue"])


def test_the_queue_admits_the_job() -> None:
    flavor, queue, local = example("kueue.yaml")
    (group,) = queue["spec"]["resourceGroups"]
    (quotas,) = group["flavors"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert quotas["name"] == flavor["metadata"]["name"]
    assert queue["spec"]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    cluster = rayjob()["rayClusterSpec"]
    counts = {"head": 1} | {group["groupName"]: group["replicas"] for group in cluster["workerGroupSpecs"]}
    wanted = dict.fromkeys(group["coveredResources"], 0)
    for name, template in ray_pods():
        for container in template["spec"]["containers"]:
            given = container["resources"]["limits"] | container["resources"]["requests"]
            for resource, amount in given.items():
                wanted[resource] += counts[name] * int(str(amount).removesuffix("Gi"))
    offered = {entry["name"]: int(str(entry["nominalQuota"]).removesuffix("Gi")) for entry in quotas["resources"]}
    assert list(offered) == group["coveredResources"]
    assert all(offered[resource] >= amount for resource, amount in wanted.items()), "the job waits for ever"


def test_keda_scales_the_shards_as_the_chart_would() -> None:
    (scaled,) = example("keda.yaml")
    manifests = render(*NAMED, *SCALED)
    scaler = one(manifests, "HorizontalPodAutoscaler")["spec"]
    spec = scaled["spec"]
    assert spec["scaleTargetRef"] == scaler["scaleTargetRef"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (scaler["minReplicas"], scaler["maxReplicas"])
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == scaler["behavior"]
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["threshold"] == scaler["metrics"][0]["pods"]["target"]["averageValue"]


def test_the_route_leads_to_the_release() -> None:
    gateway, route = example("grpcroute.yaml")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    (service,) = [m for m in render(*NAMED) if m["kind"] == "Service" and m["metadata"]["name"] == backend["name"]]
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"}
    assert [match["method"]["service"] for match in rule["matches"]] == [DRAFT_SERVICE]
    (listener,) = gateway["spec"]["listeners"]
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["sectionName"]) == (gateway["metadata"]["name"], listener["name"])
    assert listener["hostname"] in route["spec"]["hostnames"]
    assert listener["tls"]["mode"] == "Terminate", "tokens would travel in clear text"


def test_kuberay_and_ray_pass_the_command_on_as_it_is() -> None:
    """KubeRay puts the text into a shell command; Ray joins the words that it gets, and gives them to another shell."""

    def words(text: str) -> list[str]:
        printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True, check=True)
        return printed.stdout.split("\0")[:-1]

    text = rayjob()["entrypoint"]
    assert words(list2cmdline(words(text))) == words(text) == shlex.split(text)
    assert all(word.lstrip("+").count("=") >= 1 for word in words(text)[3:]), "a word without a value"


def test_the_nodes_of_the_job_are_those_of_its_pods() -> None:
    settings = dict(word.split("=", 1) for word in verl_overrides())
    (group,) = rayjob()["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert int(settings["trainer.nnodes"]) == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert settings["trainer.n_gpus_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"]


def test_what_selects_the_workers_finds_them() -> None:
    deployment, service = example("vllm.yaml")
    (monitor,) = example("podmonitor.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert service["spec"]["selector"].items() <= labels
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    assert all(container[probe]["httpGet"]["port"] in ports for probe in container if probe.endswith("Probe"))


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("podmonitor.yaml", "PodMonitor", "podMetricsEndpoints"),
        ("keda.yaml", "ScaledObject", "triggers"),
        ("grpcroute.yaml", "Gateway", "listeners"),
        ("grpcroute.yaml", "GRPCRoute", "rules"),
    ],
)
def test_the_operator_takes_the_example(name: str, kind: str, field: str) -> None:
    manifests = example(name)
    done = operator_takes(manifests)
    assert done.returncode == 0, done.stderr
    one(manifests, kind)["spec"][field] = "http"
    assert field in operator_takes(manifests).stderr, "the schemas let everything through"


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_values_scale_the_shards_by_their_load(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    manifests = render(*NAMED, *SCALED, version=f"{version}.0")
    scaler = one(manifests, "HorizontalPodAutoscaler")
    kubernetes_validate.validate(scaler, version, strict=True)
    assert scaler["spec"]["scaleTargetRef"]["name"] == one(manifests, "StatefulSet")["metadata"]["name"]
    (rule,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert one(manifests, "ServiceMonitor"), "the adapter has no load without a scrape"


def jobs_for(targets: dict[str, list[dict[str, str]]], address: str, folder: Path) -> list[dict[str, Any]]:
    """The jobs of deploy/prometheus/kubernetes.yaml, with these targets instead of what Kubernetes would name."""
    groups = [{"targets": [address], "labels": labels} for ports in targets.values() for labels in ports]
    (folder / "targets.json").write_text(json.dumps(groups))
    jobs: list[dict[str, Any]] = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    for job in jobs:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": [NAMESPACE]}}]
        job["file_sd_configs"] = [{"files": [str(folder / "targets.json")]}]
    return jobs


def test_prometheus_scrapes_shards_and_workers_by_their_pods(server: Server, tmp_path: Path) -> None:
    """One server stands for all pods. Debian's Prometheus has no discovery of Kubernetes, so a file has its labels."""
    targets = scrape_targets()
    assert {pod: len(ports) for pod, ports in targets.items()} == {"histospec-0": 2, "rollout-worker-0": 1}
    with DraftClient(server.endpoint, "a-run", deadline=10.0) as client:
        client.ingest([1, 2], [Response([3, 4])], epoch=0)
    with Prometheus(tmp_path, jobs_for(targets, server.http, tmp_path)) as prometheus:

        def found(expression: str) -> set[tuple[str, str, str]]:
            series = [sample["metric"] for sample in prometheus.query(expression)]
            return {(labels["job"], labels["namespace"], labels["pod"]) for labels in series}

        shard, worker = (f"{NAMESPACE}/histospec", "histospec-0"), (f"{NAMESPACE}/rollout-worker", "rollout-worker-0")
        expected = {(job, NAMESPACE, pod) for job, pod in (shard, worker)}
        eventually(lambda: found("up == 1") == expected, "not each pod is scraped once")
        run = f'histospec_namespace_bytes{{job="{shard[0]}"}}'
        eventually(lambda: found(run) == {(shard[0], "a-run", shard[1])}, "the label of a run is not the server's")
        load = f'histospec_event_loop_cpu_seconds_total{{namespace="{NAMESPACE}",pod="{shard[1]}"}}'
        assert found(load) == {(shard[0], NAMESPACE, shard[1])}, "the adapter cannot find the load of the pod"
        (trigger,) = one(example("keda.yaml"), "ScaledObject")["spec"]["triggers"]
        eventually(lambda: len(prometheus.query(trigger["metadata"]["query"])) == 1, "KEDA's query finds no load")
