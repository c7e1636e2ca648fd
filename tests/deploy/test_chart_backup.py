"""Backups by the chart: a CronJob, a suspended restore, and their rights."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.charts import Manifest, render

VALUES = Path(__file__).parent / "values" / "backup.yaml"
VOLUME = "backup.enabled=true,backup.destination.persistentVolumeClaim=backups"


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pod(manifests: list[Manifest], name: str) -> dict[str, Any]:
    """Returns the pod template of a CronJob: metadata and spec."""
    found: dict[str, Any] = named(manifests, "CronJob", name)["spec"]["jobTemplate"]["spec"]["template"]
    return found


def args(manifests: list[Manifest], name: str) -> list[str]:
    (container,) = pod(manifests, name)["spec"]["containers"]
    found: list[str] = container["args"]
    return found


def test_nothing_of_it_is_there_unless_it_is_asked_for() -> None:
    assert not [manifest for manifest in render() if "backup" in str(manifest) or manifest["kind"] == "CronJob"]


def test_a_backup_reaches_all_shards_and_one_at_a_time_runs() -> None:
    manifests = render("--set", VOLUME, "--set", "replicas=3")
    service = ["discover://run-histospec-headless.rl.svc:6378", "--shards", "3", "--namespace", "*"]
    words = args(manifests, "run-histospec-backup")
    assert words[:10] == ["snapshot", "/backups/", "--keep", "14", "--from", *service]
    words = args(manifests, "run-histospec-restore")
    assert words[:9] == ["restore", "/backups/", "--merge", "--to", *service]
    spec = named(manifests, "CronJob", "run-histospec-backup")["spec"]
    assert (spec["concurrencyPolicy"], spec["schedule"]) == ("Forbid", "0 2 * * *")
    mounts = pod(manifests, "run-histospec-backup")["spec"]["containers"][0]["volumeMounts"]
    assert {mount["mountPath"] for mount in mounts} >= {"/tmp", "/backups"}


def test_a_restore_never_runs_by_itself() -> None:
    spec = named(render("--set", VOLUME), "CronJob", "run-histospec-restore")["spec"]
    assert spec["suspend"] is True
    assert spec["schedule"] == "0 0 31 2 *"


def test_shards_that_share_a_store_need_not_all_be_there() -> None:
    redis = "store.kind=redis,store.url=redis://redis:6379"
    assert "--shards" not in args(render("--set", VOLUME, "--set", redis), "run-histospec-backup")
    manifests = render("--set", VOLUME, "--set", f"{redis},mode=daemonset")
    assert "run-histospec.rl.svc:6378" in args(manifests, "run-histospec-backup")


def test_everything_that_is_given_arrives() -> None:
    manifests = render("--values", VALUES)
    words = args(manifests, "run-histospec-backup")
    assert words[:4] == ["snapshot", "s3://backups/histospec", "--keep", "5"]
    told = dict(zip(words[4::2], words[5::2], strict=True))
    assert told == {
        "--from": "discover://run-histospec-headless.rl.svc:6378",
        "--shards": "3",
        "--namespace": "run-*",
        "--token-file": "/etc/histospec/token/token",
        "--tls-ca": "/etc/histospec/tls/ca.crt",
        "--tls-cert": "/etc/histospec/tls/tls.crt",
        "--tls-key": "/etc/histospec/tls/tls.key",
    }
    for name in ("backup", "restore"):
        found = pod(manifests, f"run-histospec-{name}")
        (container,) = found["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "histospec-backup"}}]
        assert container["env"] == [{"name": "AWS_ENDPOINT_URL", "value": "https://s3.example.com"}]
        assert container["resources"]["limits"] == {"memory": "512Mi"}
        volumes = {volume["name"]: volume for volume in found["spec"]["volumes"]}
        assert volumes["token"]["secret"]["secretName"] == "histospec-admin"
        assert volumes["tls"]["secret"]["secretName"] == "histospec-backup-tls"
        assert found["spec"]["serviceAccountName"] == "histospec-backup"
        assert found["metadata"]["labels"]["team"] == "rl"


def test_the_key_of_the_shards_stays_with_them() -> None:
    manifests = render("--set", VOLUME, "--set", "tls.existingSecret=histospec-tls")
    volumes = {volume["name"]: volume for volume in pod(manifests, "run-histospec-backup")["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert volumes["tls"]["secret"]["secretName"] == "histospec-tls"


@pytest.mark.parametrize("name", ["backup", "restore"])
@pytest.mark.parametrize("words", [("--set", VOLUME), ("--values", VALUES)], ids=["volume", "everything"])
def test_its_pods_belong_to_no_service(words: tuple[object, ...], name: str) -> None:
    manifests = render(*words)
    labels = pod(manifests, f"run-histospec-{name}")["metadata"]["labels"]
    for manifest in manifests:
        if manifest["kind"] in ("Service", "PodDisruptionBudget"):
            selector = manifest["spec"]["selector"]
            selector = selector.get("matchLabels", selector)
            assert not selector.items() <= labels.items(), manifest["metadata"]["name"]


def test_the_network_lets_it_in_whoever_else_may_come() -> None:
    manifests = render("--values", VALUES)
    policy = named(manifests, "NetworkPolicy", "run-histospec-backup")["spec"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": "grpc"}]
    (peer,) = rule["from"]
    for name in ("backup", "restore"):
        labels = pod(manifests, f"run-histospec-{name}")["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    shards = named(manifests, "StatefulSet", "run-histospec")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= shards.items()
    off = render("--values", VALUES, "--set", "networkPolicy.enabled=false")
    assert not [manifest for manifest in off if manifest["kind"] == "NetworkPolicy"]


def test_nothing_is_saved_where_no_shard_runs() -> None:
    """Each run would fail."""

    def suspended(*words: str) -> Any:
        return named(render("--set", ",".join((VOLUME, *words))), "CronJob", "run-histospec-backup")["spec"]["suspend"]

    assert suspended("replicas=0") is True
    assert suspended() is False
    assert suspended("replicas=0", "store.kind=redis", "store.url=redis://a", "autoscaling.enabled=true") is False
