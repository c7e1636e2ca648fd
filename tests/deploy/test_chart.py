"""Kubernetes and the Prometheus operator accept what the chart renders, for every set of values."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.charts import (
    CHART,
    MODELS,
    container,
    helm,
    objects_in,
    one,
    operator_takes,
    pod_of,
    refusal,
    render,
    shard,
)

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
EVERYTHING = Path(__file__).parent / "values" / "everything.yaml"
PUBLISHED = Path(__file__).parent / "values" / "published.yaml"
VERSIONS = ("1.28.0", "1.30.0", "1.33.0")
OPERATOR = "monitoring.coreos.com/v1"

each_values = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


@each_values
def test_lint(values: Path) -> None:
    done = helm("lint", "--strict", CHART, "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr


@each_values
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(values: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    kinds = set()
    for manifest in render("--values", values, version=version):
        kinds.add(manifest["kind"])
        if manifest["apiVersion"].partition("/")[0] not in MODELS:
            kubernetes_validate.validate(manifest, version.rpartition(".")[0], strict=True)
    assert {"ConfigMap", "Service"} < kinds
    assert len(kinds & {"StatefulSet", "DaemonSet"}) == 1


def test_the_operator_takes_it() -> None:
    manifests = [manifest for manifest in render("--values", EVERYTHING) if manifest["apiVersion"] == OPERATOR]
    assert {manifest["kind"] for manifest in manifests} == {"ServiceMonitor", "PrometheusRule"}
    done = operator_takes(manifests)
    assert done.returncode == 0, done.stderr
    one(manifests, "ServiceMonitor")["spec"]["endpoints"] = "all"
    assert "endpoints" in operator_takes(manifests).stderr, "the schemas let everything through"


def test_a_change_of_an_option_rolls_the_shards() -> None:
    def checksum(*words: object) -> str:
        template = one(render(*words), "StatefulSet")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum("--set", "replicas=3")
    assert checksum() != checksum("--set", "options.threads=2")


@each_values
def test_every_pod_is_hardened(values: Path) -> None:
    for spec in filter(None, map(pod_of, render("--values", values))):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for entry in spec["containers"] + spec.get("initContainers", []):
            context = entry["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            # A folder of the node belongs to root until this container gives it away.
            needs = {"add": ["CHOWN", "FOWNER"]} if entry["name"] == "own-data" else {}
            assert context["capabilities"] == {"drop": ["ALL"], **needs}


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ((), 35),
        (("--values", EVERYTHING), 51),
        (("--set", "terminationGracePeriodSeconds=25"), 25),
        (("--set", "options.drain-seconds=0"), 15),
        (("--set", "options.drain-seconds=null"), 35),
        (("--set", "terminationGracePeriodSeconds=600,options.drain-seconds=300"), 600),
    ],
)
def test_the_grace_period_is_longer_than_the_drain(words: tuple[object, ...], seconds: int) -> None:
    assert shard(render(*words))["terminationGracePeriodSeconds"] == seconds


@pytest.mark.parametrize(
    ("words", "least"),
    [("", 25), ("preStopSeconds=0,", 20), ("options.drain-seconds=100,", 105), ("options.drain-seconds=0,", 5)],
)
def test_a_grace_period_shorter_than_the_drain_is_refused(words: str, least: int) -> None:
    said = refusal("--set", f"{words}terminationGracePeriodSeconds={least - 1}")
    assert f"terminationGracePeriodSeconds is {least - 1}; must be at least {least} (preStopSeconds and options" in said


def test_probes_go_over_http_under_tls() -> None:
    def probe(*words: str) -> Any:
        return container(render(*words))["readinessProbe"]

    assert probe()["grpc"] == {"port": 6378, "service": "histospec.v1.DraftService"}
    assert probe("--set", "tls.existingSecret=certificate")["httpGet"] == {"path": "/readyz", "port": "http"}


def test_probes_have_the_numbers_of_the_values() -> None:
    server = container(render("--values", PUBLISHED))
    for name, words in (
        ("startupProbe", {"failureThreshold": 90, "periodSeconds": 2}),
        ("livenessProbe", {"initialDelaySeconds": 5, "terminationGracePeriodSeconds": 10}),
        ("readinessProbe", {"successThreshold": 2}),
    ):
        assert words.items() <= server[name].items(), name
        assert server[name]["httpGet"]["path"] in ("/livez", "/readyz")


def test_hooks_stand_beside_the_wait_or_replace_it() -> None:
    wait = {"exec": {"command": ["sleep", "5"]}}
    assert container(render())["lifecycle"] == {"preStop": wait}
    started = {"exec": {"command": ["true"]}}
    assert container(render("--values", PUBLISHED))["lifecycle"] == {"preStop": wait, "postStart": started}
    own = container(render("--set", "lifecycle.preStop.sleep.seconds=3"))["lifecycle"]
    assert own["preStop"]["sleep"] == {"seconds": 3}
    assert "exec" not in own["preStop"]
    assert "lifecycle" not in container(render("--set", "preStopSeconds=0"))


def test_pods_are_replaced_as_the_values_say() -> None:
    spec = one(render("--values", PUBLISHED), "StatefulSet")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}
    assert spec["minReadySeconds"] == 10
    assert spec["podManagementPolicy"] == "Parallel"
    spec = one(render("--set", "mode=daemonset,updateStrategy.type=OnDelete"), "DaemonSet")["spec"]
    assert spec["updateStrategy"] == {"type": "OnDelete"}


def test_containers_of_the_user_stand_beside_the_server() -> None:
    spec = shard(render("--values", VALUES[0].parent / "redis-ca.yaml"))
    assert [entry["name"] for entry in spec["containers"]] == ["histospec", "logs"]
    assert [entry["name"] for entry in spec["initContainers"]] == ["wait"]
    assert spec["containers"][0]["envFrom"] == [{"configMapRef": {"name": "proxies"}}]


def test_services_find_the_shards_and_nothing_else() -> None:
    manifests = render()
    labels = one(manifests, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    services = [manifest for manifest in manifests if manifest["kind"] == "Service"]
    assert len(services) == 2
    for service in services:
        selector = service["spec"]["selector"].items()
        assert selector <= labels.items()
        assert not selector <= one(manifests, "Pod")["metadata"]["labels"].items(), "finds the pod of helm test, too"


def test_one_service_is_scraped() -> None:
    for mode, kind in product(("statefulset", "daemonset"), ("ClusterIP", "NodePort")):
        words = f"mode={mode},service.type={kind},tls.existingSecret=tls,serviceMonitor.enabled=true"
        manifests = render("--set", words)
        wanted = one(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
        services = [manifest for manifest in manifests if manifest["kind"] == "Service"]
        (scraped,) = [service["spec"] for service in services if wanted <= service["metadata"]["labels"].items()]
        assert "http" in [port["name"] for port in scraped["ports"]]


def test_shards_are_named_by_what_survives_a_restart() -> None:
    def name_from(mode: str) -> Any:
        (variable,) = [
            entry
            for entry in container(render("--set", f"mode={mode}"))["env"]
            if entry["name"] == "HISTOSPEC_SHARD_NAME"
        ]
        return variable["valueFrom"]["fieldRef"]["fieldPath"]

    assert name_from("statefulset") == "metadata.name"
    assert name_from("daemonset") == "spec.nodeName"


def test_a_folder_of_the_node_belongs_to_the_user_of_the_pod(tmp_path: Path) -> None:
    """The node makes it for root. The test runs the command of the container, for this user and for another one."""
    for user in (65532, 1234):
        words = f"mode=daemonset,daemonset.hostPath=/var/lib/histospec,podSecurityContext.runAsUser={user}"
        (first,) = shard(render("--set", words))["initContainers"]
        assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
        assert first["args"] == ["/data", str(user)]
        if os.geteuid() == 0:
            subprocess.run([sys.executable, *first["command"][1:], tmp_path, first["args"][1]], check=True)
            assert (tmp_path.stat().st_uid, tmp_path.stat().st_mode & 0o777) == (user, 0o700)
    assert "initContainers" not in shard(render("--set", "mode=daemonset"))


def test_a_folder_of_the_node_belongs_to_the_user_of_the_container_first() -> None:
    words = "mode=daemonset,daemonset.hostPath=/data,podSecurityContext.runAsUser=1234,securityContext.runAsUser=1001"
    (first,) = shard(render("--set", words))["initContainers"]
    assert first["args"] == ["/data", "1001"]
    words = "mode=daemonset,daemonset.hostPath=/data,podSecurityContext=null,securityContext=null"
    (first,) = shard(render("--set", words))["initContainers"]
    assert first["args"] == ["/data", "65532"], "the user of the image"


LARGE = 1000680000
"""Helm reads numbers of files as floating-point numbers, and prints this one as 1.00068e+09."""


def numbers(value: Any) -> Iterator[Any]:
    """Returns the numbers of a manifest that come from LARGE, and the words with an exponent."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif str(value) == str(LARGE) or re.search(r"\d[eE][+]\d", str(value)):
        yield value


@pytest.mark.parametrize("mode", ["statefulset", "daemonset"])
def test_large_whole_numbers_stay_whole_numbers(tmp_path: Path, mode: str) -> None:
    redis = {"kind": "redis", "url": "redis://a"}
    values: Any = {
        "mode": mode,
        "minReadySeconds": LARGE,
        "revisionHistoryLimit": LARGE,
        "terminationGracePeriodSeconds": LARGE,
        "podSecurityContext": {"runAsUser": LARGE},
        "startupProbe": {"failureThreshold": LARGE},
        "options": {"max-batch": LARGE},
        "tokens": {"callers": [{"name": "a", "namespaces": ["a"], "rotation": LARGE, "shares": {"sessions": LARGE}}]},
    }
    if mode == "statefulset":
        values["store"] = redis
        values["autoscaling"] = {"enabled": True, "minReplicas": LARGE, "maxReplicas": LARGE}
        values["podDisruptionBudget"] = {"maxUnavailable": LARGE}
        values["backup"] = {"enabled": True, "deadlineSeconds": LARGE, "keep": LARGE}
        values["backup"]["destination"] = {"persistentVolumeClaim": "backups"}
    else:
        values["daemonset"] = {"hostPath": "/data"}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    manifests = render("--values", tmp_path / "values.yaml")
    found = list(numbers([m for m in manifests if m["kind"] != "Secret"]))
    assert set(map(str, found)) == {str(LARGE)}
    assert len(found) >= (12 if mode == "statefulset" else 6)
    assert f"max-batch = {LARGE}" in one(manifests, "ConfigMap")["data"]["histospec.toml"]
    (team,) = [m for m in manifests if m["metadata"]["name"] == "run-histospec-token-a"]
    assert team["metadata"]["annotations"]["histospec/rotation"] == str(LARGE)


@pytest.mark.parametrize(
    ("release", "words", "from_"),
    [
        ("4sight", "replicas=1", "the release's name, with nameOverride,"),
        ("2026", "replicas=1", "the release's name, with nameOverride,"),
        ("my.run", "replicas=1", "the release's name, with nameOverride,"),
        ("run", "nameOverride=a.b", "the release's name, with nameOverride,"),
        ("run", "fullnameOverride=4sight", "fullnameOverride"),
        ("run", "fullnameOverride=my.run", "fullnameOverride"),
    ],
)
def test_a_name_that_a_service_cannot_have_is_refused(release: str, words: str, from_: str) -> None:
    flags = ("--kube-version", "1.30.0", "--set")
    done = helm("template", release, CHART, *flags, words)
    assert f"- {from_} gives the objects the name " in done.stderr
    assert "set fullnameOverride to such a name" in done.stderr
    assert helm("template", release, CHART, *flags, "fullnameOverride=drafts").returncode == 0


@pytest.mark.parametrize("cut", ["-", ".", "-.-"])
def test_a_long_name_does_not_end_in_a_hyphen_or_a_dot(cut: str) -> None:
    labels = one(render("--set", f"nameOverride=a{'b' * (39 - len(cut))}{cut}c,fullnameOverride=run"), "StatefulSet")
    assert labels["metadata"]["labels"]["app.kubernetes.io/name"] == "a" + "b" * (39 - len(cut))


NAMES = [
    "tokens.existingSecret",
    "tokens.key",
    "tls.existingSecret",
    "tls.clientCA.existingSecret",
    "tls.clientCA.key",
    "backup.tokenSecret",
    "backup.tokenKey",
    "backup.tlsSecret",
    "backup.destination.persistentVolumeClaim",
    "backup.serviceAccount.name",
    "serviceAccount.name",
    "runtimeClassName",
    "priorityClassName",
    "schedulerName",
    "nameOverride",
    "persistence.storageClass",
    "test.existingSecret",
    "service.loadBalancerClass",
]


def named(name: str, fullname: str) -> list[Any]:
    """Renders a release with this name in every place that takes one. Returns its objects without their annotations."""
    on = (
        "backup.enabled=true,backup.serviceAccount.create=false,serviceAccount.create=false,test.args={a},"
        "service.type=LoadBalancer"
    )
    words = ",".join(f"{key}={name}" for key in NAMES)
    flags = ("--kube-version", "1.30.0", "--set", on, "--set-string", f"fullnameOverride={fullname},{words}")
    done = helm("template", name, CHART, *flags)
    assert done.returncode == 0, done.stderr
    found = re.sub("checksum/config: .*", "checksum/config: c", done.stdout)
    return objects_in(found)


def replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key.replace(old, new): replaced(part, old, new) for key, part in value.items()}
    if isinstance(value, list):
        return [replaced(part, old, new) for part in value]
    return value.replace(old, new) if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("name", "fullname"), [("null", "null"), ("yes", "yes"), ("2026", "drafts"), ("12e4567", "drafts")]
)
def test_a_name_that_yaml_takes_for_something_else_stays_a_name(name: str, fullname: str) -> None:
    plain = named("quite-plain", "other-plain")
    assert named(name, fullname) == replaced(replaced(plain, "quite-plain", name), "other-plain", fullname)


def test_settings_of_the_cluster_reach_the_pods() -> None:
    values = Path(__file__).parent / "values" / "teams.yaml"
    manifests = render("--values", values, "--set", "schedulerName=volcano")
    spec = shard(manifests)
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("gvisor", "volcano")
    assert spec["hostAliases"] == [{"ip": "10.0.0.7", "hostnames": ["redis.example.org"]}]
    assert spec["dnsConfig"] == {"options": [{"name": "ndots", "value": "2"}]}
    assert one(manifests, "StatefulSet")["spec"]["revisionHistoryLimit"] == 3
    (extra,) = [m for m in manifests if m["metadata"]["name"] == "run-extra"]
    assert extra["metadata"]["annotations"] == {"endpoint": "discover://run-histospec-headless.rl.svc:6378"}
