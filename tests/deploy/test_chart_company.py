"""What the rules of a company ask of a chart: labels, annotations, service accounts, zones, and certificates."""

from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.charts import Manifest, one, operator_takes, options, pod_of, refusal, render, shard

COMPANY = Path(__file__).parent / "values" / "company.yaml"
LABEL, ANNOTATION = "example.com/cost-centre", "example.com/owner"


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pods(manifest: Manifest) -> Any:
    """The metadata of the pods that an object makes; {} if it makes none."""
    spec = manifest.get("spec", {})
    return spec.get("jobTemplate", {}).get("spec", spec).get("template", {}).get("metadata", {})


def selectors(manifest: Manifest) -> Any:
    spec = manifest.get("spec", {})
    return [spec.get(name) for name in ("selector", "podSelector", "volumeClaimTemplates", "ingress")]


def test_every_object_and_pod_has_the_common_labels() -> None:
    manifests = render("--values", COMPANY)
    assert {"CronJob", "Pod", "ServiceAccount", "Certificate", "PrometheusRule"} < {m["kind"] for m in manifests}
    for manifest in manifests:
        assert manifest["metadata"]["labels"][LABEL] == "rl", manifest["kind"]
        if made := pods(manifest):
            assert made["labels"][LABEL] == "rl", manifest["kind"]


def test_every_object_has_the_common_annotations_beside_its_own() -> None:
    manifests = render("--values", COMPANY)
    for manifest in manifests:
        assert manifest["metadata"]["annotations"][ANNOTATION] == "rl-infra@example.com", manifest["kind"]
        assert ANNOTATION not in pods(manifest).get("annotations", {}), "a new annotation would restart the shards"
    assert one(manifests, "Pod")["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert one(manifests, "Secret")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_common_labels_change_no_selector_and_no_volume() -> None:
    """Kubernetes cannot change these."""
    words = ("--values", COMPANY, "--set", "commonLabels=null")
    for before, after in zip(render(*words), render("--values", COMPANY), strict=True):
        assert before["kind"] == after["kind"]
        assert selectors(before) == selectors(after), before["kind"]


def test_a_common_label_does_not_replace_the_chart_s_own() -> None:
    for manifest in render("--values", COMPANY):
        assert manifest["metadata"]["labels"].get("app.kubernetes.io/name") != "mine", manifest["kind"]


def test_shards_and_backups_have_service_accounts_of_their_own() -> None:
    manifests = render("--values", COMPANY)
    for name, annotation in (
        ("run-histospec", "example.com/role"),
        ("run-histospec-backup", "eks.amazonaws.com/role-arn"),
    ):
        account = named(manifests, "ServiceAccount", name)
        assert annotation in account["metadata"]["annotations"]
        assert account["automountServiceAccountToken"] is False
    assert shard(manifests)["serviceAccountName"] == "run-histospec"
    for job in ("backup", "restore"):
        found = pod_of(named(manifests, "CronJob", f"run-histospec-{job}"))
        assert found["serviceAccountName"] == "run-histospec-backup"


@pytest.mark.parametrize(
    ("words", "made", "used"),
    [
        ("", ["run-histospec"], "run-histospec"),
        ("serviceAccount.name=mine", ["mine"], "mine"),
        ("serviceAccount.create=false,serviceAccount.name=mine", [], "mine"),
        ("serviceAccount.create=false", [], None),
    ],
)
def test_a_service_account_is_made_or_named(words: str, made: list[str], used: str | None) -> None:
    manifests = render("--set", words)
    assert [m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"] == made
    assert shard(manifests).get("serviceAccountName") == used


def test_an_account_that_shards_and_backups_share_is_there_once() -> None:
    backup = "backup.enabled=true,backup.destination.persistentVolumeClaim=a"
    words = f"{backup},serviceAccount.name=acc,backup.serviceAccount.name=acc"
    annotations = "serviceAccount.annotations.a=1,backup.serviceAccount.annotations.b=2"
    account = one(render("--set", words, "--set-string", annotations), "ServiceAccount")
    assert account["metadata"]["name"] == "acc"
    assert account["metadata"]["annotations"] == {"a": "1", "b": "2"}


LABELS = ("name", "instance", "component")


def test_labels_of_pods_leave_them_to_their_selector() -> None:
    """Kubernetes refuses a StatefulSet whose selector does not match its own pods."""
    given = ",".join(
        f"{owner}podLabels.app\\.kubernetes\\.io/{key}=x" for owner in ("", "backup.") for key in (*LABELS, "part-of")
    )
    manifests = render("--set", "backup.enabled=true,backup.destination.persistentVolumeClaim=a", "--set", given)
    for kind, name, expected in (
        ("StatefulSet", "run-histospec", ("histospec", "run", "shard")),
        ("CronJob", "run-histospec-backup", ("histospec-backup", "run", "backup")),
    ):
        spec = named(manifests, kind, name)["spec"]
        labels = spec.get("jobTemplate", {}).get("spec", spec)["template"]["metadata"]["labels"]
        assert tuple(labels[f"app.kubernetes.io/{key}"] for key in LABELS) == expected
        assert labels["app.kubernetes.io/part-of"] == "x"


def test_shards_spread_over_zones_and_nodes() -> None:
    zone, node = shard(render("--values", COMPANY))["topologySpreadConstraints"]
    assert (zone["topologyKey"], node["topologyKey"]) == ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    labels = {"app.kubernetes.io/name": "histospec", "app.kubernetes.io/instance": "run"}
    assert zone["labelSelector"] == node["labelSelector"] == {"matchLabels": labels}
    (only,) = shard(render())["topologySpreadConstraints"]
    assert (only["topologyKey"], only["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")


def test_cert_manager_takes_the_certificate() -> None:
    manifests = render("--values", COMPANY)
    certificate = one(manifests, "Certificate")
    done = operator_takes([certificate])
    assert done.returncode == 0, done.stderr
    assert certificate["spec"]["issuerRef"] == {"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    assert (certificate["spec"]["duration"], certificate["spec"]["renewBefore"]) == ("2160h", "720h")
    own = certificate["spec"]["dnsNames"]
    assert "ipAddresses" not in certificate["spec"]
    names = "tls.certManager.extraDnsNames={drafts.example.org,*.example.org}"
    addresses = "tls.certManager.ipAddresses={10.0.0.1,fd00::1}"
    extended = one(render("--values", COMPANY, "--set", f"{names},{addresses}"), "Certificate")
    assert operator_takes([extended]).returncode == 0
    assert extended["spec"]["dnsNames"] == [*own, "drafts.example.org", "*.example.org"]
    assert extended["spec"]["ipAddresses"] == ["10.0.0.1", "fd00::1"]
    assert "tls.certManager.ipAddresses.0: Does not match" in refusal("--set", "tls.certManager.ipAddresses={node-1}")
    del certificate["spec"]["issuerRef"]
    assert "issuerRef" in operator_takes([certificate]).stderr, "the schemas let everything through"


def test_the_certificate_is_mounted_served_and_trusted() -> None:
    """By the shards, the backup and `helm test`, which needs no further values."""
    manifests = render("--values", COMPANY)
    assert one(manifests, "Certificate")["spec"]["secretName"] == "run-histospec-tls"
    tls = [volume["secret"] for volume in shard(manifests)["volumes"] if volume["name"] == "tls"]
    assert [secret["secretName"] for secret in tls] == ["run-histospec-tls"]
    assert options(manifests)["tls-cert"] == "/etc/histospec/tls/tls.crt"
    test = one(manifests, "Pod")["spec"]
    backup = pod_of(named(manifests, "CronJob", "run-histospec-backup"))
    for spec, words in (
        (test, ["--tls-ca=/etc/histospec/tls/ca.crt"]),
        (backup, ["--tls-ca", "/etc/histospec/tls/ca.crt"]),
    ):
        assert " ".join(words) in " ".join(spec["containers"][0]["args"])
        (volume,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "tls"]
        assert volume["secretName"] == "run-histospec-tls"
        assert [item["key"] for item in volume["items"]] == ["ca.crt"]


def test_the_certificate_has_the_names_that_callers_check() -> None:
    manifests = render("--values", COMPANY)
    names = one(manifests, "Certificate")["spec"]["dnsNames"]
    words = one(manifests, "Pod")["spec"]["containers"][0]["args"]
    called = {word.removeprefix("discover://").partition(":")[0] for word in words if word.startswith("discover://")}
    assert called == {"run-histospec-headless.rl.svc"}
    assert called | {"run-histospec.rl.svc", "*.run-histospec-headless.rl.svc"} <= set(names)
    trustme.CA().issue_cert(*names)


def test_certificates_come_from_one_place() -> None:
    wanted = "tls.certManager.enabled=true"
    assert "tls.certManager.enabled needs an issuer: set tls.certManager.issuerRef.name" in refusal("--set", wanted)
    said = refusal("--set", f"{wanted},tls.certManager.issuerRef.name=a,tls.existingSecret=b")
    assert "tls.existingSecret and tls.certManager.enabled: set only one of them" in said
    published = render("--set", f"{wanted},tls.certManager.issuerRef.name=a,service.type=LoadBalancer")
    assert one(published, "Certificate")["spec"]["issuerRef"]["kind"] == "Issuer"
    guarded = render("--set", f"{wanted},tls.certManager.issuerRef.name=a,tls.clientCA.existingSecret=c")
    assert "Pod" not in {manifest["kind"] for manifest in guarded}, "the test has no client certificate"
