"""Access to a shard: the peers that the NetworkPolicy admits, and what is published beyond the cluster."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.charts import NAMESPACE, Manifest, one, refusal, render

VALUES = Path(__file__).parent / "values"
WORKER = {"app": "rollouts"}


def matches(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    return selector is not None and (selector.get("matchLabels") or {}).items() <= labels.items()


def admits(policy: Manifest, port: str, namespace: str, labels: dict[str, str]) -> bool:
    """Returns whether a policy admits a pod with these labels, by the rules of the Kubernetes documentation."""
    for rule in policy["spec"]["ingress"]:
        if not any(entry["port"] == port for entry in rule["ports"]):
            continue
        if not rule.get("from"):
            return True
        for peer in rule["from"]:
            where = matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace}) if (
                "namespaceSelector" in peer
            ) else namespace == NAMESPACE  # fmt: skip
            if where and "ipBlock" not in peer and matches(peer.get("podSelector", {}), labels):
                return True
    return False


def policy(*words: object) -> Manifest:
    return one(render(*words), "NetworkPolicy")


def peers(name: str, namespace: str) -> str:
    return f"networkPolicy.{name}[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name={namespace}"


def test_by_default_only_the_own_namespace_gets_in() -> None:
    """The HTTP port names the runs of all teams."""
    rules = policy()
    for port in ("grpc", "http"):
        assert admits(rules, port, NAMESPACE, WORKER), port
        assert not admits(rules, port, "elsewhere", WORKER), port
    assert not admits(policy("--set", "networkPolicy.sameNamespace=false"), "http", NAMESPACE, WORKER)


def test_from_adds_to_the_own_namespace() -> None:
    rules = policy("--set", peers("from", "trainers"))
    assert admits(rules, "grpc", "trainers", WORKER)
    assert admits(rules, "grpc", NAMESPACE, WORKER)
    assert not admits(rules, "grpc", "elsewhere", WORKER)


def test_the_own_namespace_may_be_left_out() -> None:
    rules = policy("--set", "networkPolicy.sameNamespace=false")
    assert not admits(rules, "grpc", NAMESPACE, WORKER)
    rules = policy("--set", "networkPolicy.sameNamespace=false," + peers("from", "trainers"))
    assert not admits(rules, "grpc", NAMESPACE, WORKER)
    assert admits(rules, "grpc", "trainers", WORKER)


@pytest.mark.parametrize(
    "words", [("",), ("networkPolicy.sameNamespace=false",), (peers("from", "trainers"), peers("httpFrom", "metrics"))]
)
def test_helm_test_passes_whoever_else_may(words: tuple[str, ...]) -> None:
    manifests = render("--set", ",".join(words))
    labels = one(manifests, "Pod")["metadata"]["labels"]
    for port in ("grpc", "http"):
        assert admits(one(manifests, "NetworkPolicy"), port, NAMESPACE, labels), port
        assert not admits(one(manifests, "NetworkPolicy"), "grpc", "elsewhere", labels)


def test_http_from_adds_to_the_own_namespace() -> None:
    rules = policy("--set", peers("httpFrom", "metrics"))
    assert admits(rules, "http", "metrics", {})
    assert admits(rules, "http", NAMESPACE, WORKER)
    assert not admits(rules, "grpc", "metrics", WORKER)
    assert not admits(rules, "http", "elsewhere", {})


def services(*words: object) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m["spec"] for m in render(*words) if m["kind"] == "Service"}


@pytest.mark.parametrize(("kind", "mode"), [*product(("LoadBalancer", "NodePort"), ("statefulset", "daemonset"))])
def test_http_is_never_published(kind: str, mode: str) -> None:
    found = services("--set", f"service.type={kind},mode={mode},tls.existingSecret=tls")
    published = [spec for spec in found.values() if spec.get("type") == kind]
    assert [[port["name"] for port in spec["ports"]] for spec in published] == [["grpc"]]
    assert [port["name"] for port in found["run-histospec-http"]["ports"]] == ["http"]
    assert found["run-histospec-http"]["type"] == "ClusterIP"


def test_inside_the_cluster_one_service_has_both_ports() -> None:
    found = services()
    assert found.keys() == {"run-histospec", "run-histospec-headless"}
    assert [port["name"] for port in found["run-histospec"]["ports"]] == ["grpc", "http"]


def test_what_users_say_of_the_published_service_reaches_it() -> None:
    spec = services("--values", VALUES / "published.yaml")["run-histospec"]
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert spec["loadBalancerClass"] == "example.com/internal"
    assert spec["externalTrafficPolicy"] == "Local"
    assert services("--values", VALUES / "daemonset-published.yaml")["run-histospec"]["ports"][0]["nodePort"] == 30637


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_publishing_needs_tls_and_callers_with_names(kind: str) -> None:
    said = refusal("--set", f"service.type={kind}")
    assert f"service.type {kind} publishes the shards beyond the cluster, where tokens and responses need TLS" in said
    said = refusal("--set", f"service.type={kind},security.insecure=true,tls.existingSecret=tls")
    assert "set security.insecure to false" in said
    for guard in (
        "tokens.create=true",
        "tokens.existingSecret=ours",
        "tls.clientCA.existingSecret=ca,tokens.create=false",
    ):
        render("--set", f"service.type={kind},tls.existingSecret=tls,{guard}")
