"""The chart in a real control plane, installed, upgraded, rolled back and removed by helm; its pods run on fake nodes.

Runs only with HISTOSPEC_TEST_CLUSTER=1 (make test-cluster), for some minutes.
"""

import json
import re
from pathlib import Path

import pytest

from tests.support.charts import RELEASE
from tests.support.control_plane import Cluster, asked_for
from tests.support.kubernetes_api import Refused
from tests.support.releases import Release, values_of
from tests.support.waiting import eventually

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))

pytestmark = asked_for


def level(values: Path) -> str:
    """Pod Security allows ports and folders of the node only at the level `privileged`."""
    return "privileged" if values_of(values).get("mode") == "daemonset" else "restricted"


def expected(values: Path, cluster: Cluster) -> int:
    given = values_of(values)
    if given.get("mode") == "daemonset":
        return len(cluster.nodes.names)
    scaled = given.get("autoscaling", {})
    return int(scaled["minReplicas"] if scaled.get("enabled") else given.get("replicas", 1))


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_a_release_is_installed_upgraded_rolled_back_and_removed(cluster: Cluster, values: Path) -> None:
    release = Release(cluster, f"set-{values.stem}", "--values", values, level=level(values))
    release.prepare()
    manifests = release.rendered()
    for manifest in manifests:
        cluster.api.try_out(manifest, release.namespace)

    assert "HISTOSPEC_ENDPOINT" in release.install()
    count = expected(values, cluster)
    eventually(
        lambda: len(release.shards()) == count, f"not {count} shards: {release.shards()}, {cluster.nodes.waiting}"
    )
    first, template, claims = release.shards(), release.workload()["spec"]["template"], release.claims()
    if any("helm.sh/hook" in m["metadata"].get("annotations", {}) for m in manifests):
        assert "Succeeded" in release.does("test", RELEASE, "--timeout", "60s")

    # A changed option restarts every shard; an added shard leaves the others unchanged.
    release.upgrade("--set", "options.threads=3")
    eventually(lambda: len(release.shards()) == count, "the shards are not back")
    second = release.shards()
    if release.rolls():
        assert not set(second.values()) & set(first.values())
    else:
        assert second == first, "pods that people replace were replaced"
    assert "threads = 3" in release.options()
    fixed = values_of(values).get("mode") == "daemonset" or "autoscaling" in values_of(values)
    if not fixed:
        release.upgrade("--set", f"options.threads=3,replicas={count + 1}")
        eventually(lambda: len(release.shards()) == count + 1, "no shard more")
        assert second.items() < release.shards().items()

    release.roll_back()
    eventually(lambda: len(release.shards()) == count, "the shards of the first revision are not back")
    assert release.workload()["spec"]["template"] == template
    assert "threads = 3" not in release.options()
    assert claims.items() <= release.claims().items(), "a shard has lost its volume"

    policy = release.workload()["spec"].get("persistentVolumeClaimRetentionPolicy", {})
    release.does("uninstall", RELEASE)
    eventually(lambda: not release.objects("pods"), "pods are left")
    kept = {
        f"{manifest['kind']} {manifest['metadata']['name']}"
        for manifest in manifests
        if manifest["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert release.left(manifests) == kept
    if policy.get("whenDeleted") == "Delete":
        eventually(lambda: not release.objects("persistentvolumeclaims"), "volumes are left")
    else:
        assert claims.items() <= release.claims().items(), "an uninstall has taken a volume"


def test_restricted_namespaces_refuse_what_is_of_the_node_and_nothing_else(cluster: Cluster) -> None:
    release = Release(cluster, "restricted", "--set", "mode=daemonset,daemonset.hostPort=6378")
    release.begin()
    eventually(
        lambda: any("hostPort" in event["message"] for event in release.objects("events")),
        "Pod Security lets the port of a node through",
    )
    assert release.shards() == {}
    release.upgrade("--set", "daemonset.hostPort=0")
    assert len(release.shards()) == len(cluster.nodes.names)


def test_the_server_is_strict(cluster: Cluster) -> None:
    release = Release(cluster, "strict")
    (workload,) = [manifest for manifest in release.rendered() if manifest["kind"] == "StatefulSet"]
    cluster.api.try_out(workload, release.namespace)
    workload["spec"]["template"]["spec"]["containers"][0]["readOnly"] = True
    with pytest.raises(Refused, match=r'unknown field "spec.template.spec.containers\[0\].readOnly"'):
        cluster.api.try_out(workload, release.namespace)
    assert release.objects("apps/statefulsets") == []


def test_a_drain_of_nodes_takes_one_shard_at_a_time(cluster: Cluster) -> None:
    release = Release(cluster, "drain", "--set", "replicas=3").installed()

    def evict(name: str) -> None:
        path = f"/api/v1/namespaces/drain/pods/{name}"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        cluster.api.call("POST", f"{path}/eviction", eviction)

    (budget,) = release.objects("policy/poddisruptionbudgets")
    eventually(
        lambda: release.objects("policy/poddisruptionbudgets")[0]["status"].get("disruptionsAllowed") == 1, f"{budget}"
    )
    first, second, _ = sorted(release.shards())
    before = release.shards()
    with cluster.nodes.paused():
        evict(first)
        with pytest.raises(Refused, match="disruption budget"):
            evict(second)
    eventually(lambda: len(release.shards()) == 3, "the shard is not back")
    assert [name for name in before if release.shards()[name] != before[name]] == [first]


def test_a_volume_s_size_changes_as_the_docs_say(cluster: Cluster) -> None:
    release = Release(cluster, "size", "--set", "replicas=2").installed()
    claims, shards = release.claims(), release.shards()
    larger = ("--set", "persistence.size=80Gi")
    refused = release.refuses(*larger)
    assert "persistence.size is 80Gi, and the volumes of StatefulSet run-histospec have 50Gi" in refused
    (patch,) = re.findall(r"--patch '(.*?)'", refused)
    for name in claims:
        cluster.api.call("PATCH", f"/api/v1/namespaces/size/persistentvolumeclaims/{name}", json.loads(patch))
    release.delete_workload(orphan=True)
    assert release.shards() == shards, "a shard has ended with its StatefulSet"
    release.upgrade(*larger)
    assert release.claims() == claims
    (template,) = release.workload()["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"]["requests"]["storage"] == "80Gi"
    assert release.shards().keys() == shards.keys()


def test_a_release_that_comes_back_finds_its_volumes(cluster: Cluster) -> None:
    release = Release(cluster, "again", "--set", "replicas=2").installed()
    claims = release.claims()
    release.does("uninstall", RELEASE)
    eventually(lambda: not release.objects("pods"), "pods are left")
    release.install()
    assert release.claims() == claims
    assert len(release.shards()) == 2


def test_the_fake_nodes_start_no_pod_whose_secret_is_missing(cluster: Cluster) -> None:
    release = Release(cluster, "missing", "--set", "store.kind=redis,store.existingSecret=absent")
    release.begin()
    eventually(lambda: "no absent in secrets" in cluster.nodes.waiting.values(), "the pod runs without its Secret")
    assert release.shards() == {}
