"""The chart's look-ups in a real API server: existing tokens stay, and fewer shards need confirmation."""

import base64

import pytest

from tests.support.charts import CHART, RELEASE
from tests.support.control_plane import Cluster, asked_for
from tests.support.fake_nodes import PROVISIONER
from tests.support.releases import HELMS, Release
from tests.support.waiting import eventually

TOKENS = "run-histospec-tokens"

pytestmark = asked_for


def tokens(release: Release) -> dict[str, str]:
    """Returns the content of the Secret that the chart creates; {} if it does not exist."""
    found = [secret["data"] for secret in release.objects("secrets") if secret["metadata"]["name"] == TOKENS]
    return {key: base64.b64decode(value).decode() for key, value in found[0].items()} if found else {}


@pytest.mark.parametrize("helm", HELMS)
def test_tokens_are_made_once_and_kept(cluster: Cluster, helm: str) -> None:
    release = Release(cluster, f"tokens-{helm.replace('.', '-')}", helm=helm).installed()
    assert "Succeeded" in release.does("test", RELEASE, "--timeout", "60s")
    made = tokens(release)
    assert {"tokens.toml", "worker-token", "admin-token"} <= made.keys()
    assert len({made["worker-token"], made["admin-token"]}) == 2
    shards = release.shards()
    release.upgrade()
    assert tokens(release) == made
    assert release.shards() == shards, "an upgrade that changes nothing has rolled the shards"
    release.upgrade("--set", "options.threads=2")
    release.roll_back()
    assert tokens(release) == made
    release.does("uninstall", RELEASE)
    eventually(lambda: not release.objects("pods"), "pods are left")
    assert tokens(release) == made, "an uninstall has taken the tokens from the workers"
    release.install()
    assert tokens(release) == made


def test_tokens_that_were_rotated_are_put_back_by_a_rollback_alone(cluster: Cluster) -> None:
    release = Release(cluster, "rotated").installed()
    made = tokens(release)
    path = f"/api/v1/namespaces/{release.namespace}/secrets/{TOKENS}"
    cluster.api.call("PATCH", path, {"stringData": {"worker-token": "another", "mine": "added"}})
    release.upgrade("--set", "options.threads=2")
    assert tokens(release)["worker-token"] == "another"
    assert tokens(release)["mine"] == "added"
    release.roll_back()
    assert tokens(release)["worker-token"] == made["worker-token"], "docs/kubernetes.md says otherwise"


@pytest.mark.parametrize("helm", HELMS)
def test_a_rollback_returns_to_the_made_tokens(cluster: Cluster, helm: str) -> None:
    release = Release(cluster, f"back-{helm.replace('.', '-')}", helm=helm).installed()
    made = tokens(release)
    release.upgrade("--set", "security.insecure=true")
    assert "insecure = true" in release.options()
    release.roll_back()
    assert "insecure" not in release.options()
    assert tokens(release) == made


@pytest.mark.parametrize("helm", HELMS)
def test_shards_that_were_stopped_need_consent_to_stay_away(cluster: Cluster, helm: str) -> None:
    release = Release(cluster, f"stopped-{helm.replace('.', '-')}", "--set", "replicas=3", helm=helm).installed()
    claims = release.claims()
    release.upgrade("--set", "replicas=0")
    eventually(lambda: not release.objects("pods"), "the shards are still there")
    refused = release.refuses("--set", "replicas=1")
    assert "replicas is 1, and volumes of further shards exist (data-run-histospec-1, data-run-histospec-2)" in refused
    release.upgrade()
    eventually(lambda: len(release.shards()) == 3, "the shards are not back")
    assert release.claims() == claims
    release.upgrade("--set", "replicas=0")
    release.upgrade("--set", "replicas=1,scaleDown.confirmReplicas=1")
    release.upgrade("--set", "replicas=1,options.threads=2")
    assert release.claims() == claims
    release.does("uninstall", RELEASE)
    eventually(lambda: not release.objects("pods"), "pods are left")
    again = release.helm("install", RELEASE, CHART, "--set", "replicas=2")
    assert "volumes of further shards exist (data-run-histospec-2)" in again.stderr


def test_shards_move_from_volumes_to_redis_and_back_as_the_docs_say(cluster: Cluster) -> None:
    release = Release(cluster, "moved", "--set", "replicas=2").installed()
    claims, shards = release.claims(), release.shards()
    redis = ("--set", "store.kind=redis,store.url=redis://redis:6379")
    refused = release.refuses(*redis)
    assert "store.kind is redis, and the shards of StatefulSet run-histospec have their histories on volumes" in refused
    assert "delete statefulset run-histospec --cascade=orphan" in refused
    assert release.shards() == shards
    release.delete_workload(orphan=True)
    assert release.shards() == shards, "a shard has ended with its StatefulSet"
    release.upgrade(*redis)
    assert release.shards().keys() == shards.keys()
    assert not set(release.shards().values()) & set(shards.values()), "a shard still has the old store"
    assert release.claims() == claims

    refused = release.refuses()
    assert "StatefulSet run-histospec has no volumes" in refused
    release.delete_workload(orphan=False)
    release.upgrade()
    eventually(lambda: release.shards().keys() == shards.keys(), "the shards are not back")
    assert release.claims() == claims


def test_the_class_of_new_volumes_changes_as_the_docs_say(cluster: Cluster) -> None:
    storage = {"metadata": {"name": "fast"}, "provisioner": PROVISIONER}
    cluster.api.call("POST", "/apis/storage.k8s.io/v1/storageclasses", storage)
    release = Release(cluster, "class", "--set", "replicas=1").installed()
    fast = "persistence.storageClass=fast"
    assert 'persistence.storageClass is "fast"' in release.refuses("--set", fast)
    release.delete_workload(orphan=True)
    release.upgrade("--set", fast)
    release.upgrade("--set", f"{fast},replicas=2")
    classes = {c["metadata"]["name"]: c["spec"]["storageClassName"] for c in release.objects("persistentvolumeclaims")}
    assert classes == {"data-run-histospec-0": "folders", "data-run-histospec-1": "fast"}


@pytest.mark.parametrize(("policy", "left"), [("Retain", 2), ("Delete", 0)])
def test_a_statefulset_with_volumes_becomes_a_daemonset_with_consent(cluster: Cluster, policy: str, left: int) -> None:
    words = f"replicas=2,persistence.retentionPolicy.whenDeleted={policy}"
    release = Release(cluster, f"nodes-{policy.lower()}", "--set", words).installed()
    shards = release.shards()
    refused = release.refuses("--set", "mode=daemonset")
    assert "mode is daemonset, and the shards of StatefulSet run-histospec have their histories on volumes" in refused
    assert ("and its volumes, and no shard" in refused) == (policy == "Delete")
    assert release.shards() == shards
    release.does("upgrade", RELEASE, CHART, "--set", "mode=daemonset,scaleDown.confirmReplicas=0")
    eventually(lambda: len(release.shards()) == len(cluster.nodes.names), "not a shard on each node")
    eventually(lambda: not release.objects("apps/statefulsets"), "the StatefulSet is still there")
    eventually(lambda: len(release.objects("persistentvolumeclaims")) == left, "the volumes are not as told")
    release.does("upgrade", RELEASE, CHART, "--set", "mode=daemonset")


def test_a_rollback_asks_for_no_consent(cluster: Cluster) -> None:
    """A rollback renders nothing, as docs/kubernetes.md says."""
    release = Release(cluster, "unasked", "--set", "replicas=1").installed()
    release.upgrade("--set", "replicas=2")
    release.roll_back()
    eventually(lambda: len(release.shards()) == 1, "the shard is still there")


@pytest.mark.parametrize(("policy", "left"), [("Retain", 2), ("Delete", 1)])
def test_shards_go_with_consent_and_their_volumes_stay_or_go_as_told(cluster: Cluster, policy: str, left: int) -> None:
    words = f"replicas=2,persistence.retentionPolicy.whenScaled={policy}"
    release = Release(cluster, f"scaled-{policy.lower()}", "--set", words).installed()
    said = release.refuses("--set", "replicas=1,scaleDown.confirmReplicas=2")
    assert "replicas is 1, and 2 shards run, each with its own history in SQLite" in said
    release.upgrade("--set", "replicas=1,scaleDown.confirmReplicas=1")
    eventually(lambda: len(release.shards()) == 1, "the shard is still there")
    eventually(lambda: len(release.objects("persistentvolumeclaims")) == left, "the volumes are not as told")
