"""The examples in a real control plane, beside a release of the chart: `make test-cluster`."""

import copy
from pathlib import Path

import pytest
import yaml

from tests.support.charts import NAMESPACE, one
from tests.support.control_plane import Cluster, asked_for
from tests.support.examples import FOLDER, NAMED, example, ray_pods
from tests.support.kubernetes_api import Object, Refused
from tests.support.programs import PLANE, ROOT
from tests.support.releases import Release
from tests.support.waiting import eventually

RAY_JOB = PLANE / "ray.io_rayjobs.yaml"
"""KubeRay's definition of RayJob, as scripts/install-control-plane downloads it."""
RAY, RAY_JOBS = "/apis/ray.io/v1", f"namespaces/{NAMESPACE}/rayjobs"

pytestmark = asked_for


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    """The release that the examples name, installed; its namespace admits the workers' images, which run as root."""
    return Release(cluster, NAMESPACE, *NAMED, level="baseline").installed()


def apply(release: Release, manifest: Object) -> None:
    """Creates an object; unknown fields are refused."""
    release.api.call("POST", release.api.collection(manifest, NAMESPACE), manifest, fieldValidation="Strict")


def test_the_workers_start_with_the_secret_of_the_release(cluster: Cluster, release: Release) -> None:
    """Its pods start only if the Secret and the key that they mount are there."""
    for manifest in example("vllm.yaml"):
        apply(release, manifest)
    wanted = one(example("vllm.yaml"), "Deployment")["spec"]["replicas"]

    def ready() -> int:
        (found,) = release.objects("apps/deployments")
        return int(found["status"].get("readyReplicas", 0))

    eventually(lambda: ready() == wanted, f"the workers are not ready: {cluster.nodes.waiting}")
    elsewhere = copy.deepcopy(one(example("vllm.yaml"), "Deployment"))
    elsewhere["metadata"]["name"] = "elsewhere"
    for volume in elsewhere["spec"]["template"]["spec"]["volumes"]:
        if "secret" in volume:
            volume["secret"]["items"] = [{"key": "absent", "path": "worker-token"}]
    elsewhere["spec"]["replicas"] = 1
    apply(release, elsewhere)
    eventually(lambda: "histospec-tokens in secrets has no absent" in cluster.nodes.waiting.values(), "no pod waits")


def test_the_api_server_takes_the_other_examples(release: Release) -> None:
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **pod} for name, pod in ray_pods()]
    for manifest in [*example("sidecar.yaml"), *example("podmonitor.yaml"), *pods]:
        release.api.try_out(manifest, NAMESPACE)
    for manifest in release.rendered(
        "--values", FOLDER / "values-autoscaling.yaml", "--set", "fullnameOverride=scaled"
    ):
        release.api.try_out(manifest, NAMESPACE)


def define(release: Release, path: Path, root: str, objects: str) -> None:
    """Creates the definition of an operator's object. Returns once the API server serves the group and the objects."""
    if not path.exists():
        pytest.skip(f"needs {path.relative_to(ROOT)}, see scripts/install-control-plane")
    definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    release.api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    served = (root, f"{root}/{objects}")
    eventually(lambda: all(release.api.exists(path) for path in served), f"{objects} are not served")


def test_kueue_s_definitions_take_the_queue(release: Release) -> None:
    for objects in ("resourceflavors", "clusterqueues", f"namespaces/{NAMESPACE}/localqueues"):
        path = PLANE / f"kueue.x-k8s.io_{objects.rpartition('/')[2]}.yaml"
        define(release, path, "/apis/kueue.x-k8s.io/v1beta2", objects)
    manifests = example("kueue.yaml")
    for manifest in manifests:
        release.api.try_out(manifest, NAMESPACE)
    one(manifests, "ClusterQueue")["spec"]["quotas"] = []
    with pytest.raises(Refused, match=r"unknown field .*quotas"):
        release.api.try_out(one(manifests, "ClusterQueue"), NAMESPACE)


def test_kuberay_s_definition_takes_the_job(release: Release) -> None:
    define(release, RAY_JOB, RAY, RAY_JOBS)
    (job,) = example("verl-rayjob.yaml")
    release.api.try_out(job, NAMESPACE)
    apply(release, job)
    (made,) = release.api.items(f"{RAY}/{RAY_JOBS}")
    kept, given = (found["spec"]["rayClusterSpec"]["workerGroupSpecs"][0] for found in (made, job))
    assert kept["template"] == given["template"]
    assert kept.items() >= given.items(), "the server adds what has a default"
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["environment"] = []
    with pytest.raises(Refused, match=r"unknown field .*environment"):
        release.api.try_out(job, NAMESPACE)
