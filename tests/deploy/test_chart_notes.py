"""NOTES.txt: the lines for a release, and its warnings."""

import json
from pathlib import Path

from tests.support.charts import environment, notes, render, worker

VALUES = Path(__file__).parent / "values"


def test_notes_say_the_lines_for_this_release(tmp_path: Path) -> None:
    text = notes(tmp_path)
    (headless,) = [m for m in render() if m["kind"] == "Service" and m["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == "run-histospec-headless", "discovery needs the address of each shard"
    assert 6378 in [port["port"] for port in headless["spec"]["ports"]]
    assert environment(text) == {
        "HISTOSPEC_ENDPOINT": "discover://run-histospec-headless.rl.svc:6378",
        "HISTOSPEC_NAMESPACE": "run-1",
        "HISTOSPEC_TOKEN_FILE": "/etc/histospec/worker-token",
    }
    assert "--scheduler-cls histospec.client.vllm.HistoSpecScheduler" in text
    (line,) = [line for line in text.splitlines() if "--speculative-config" in line]
    assert json.loads(line.split("'")[1])["model"] == "histospec.client.vllm.HistoSpecProposer"
    assert "helm -n rl test run" in text
    assert "port-forward service/run-histospec 9464" in text


def test_workers_mount_the_token_that_the_chart_made(tmp_path: Path) -> None:
    text = notes(tmp_path)
    (volume,) = worker(text)["volumes"]
    (mount,) = worker(text)["volumeMounts"]
    (made,) = [m for m in render() if m["kind"] == "Secret"]
    assert volume["secret"]["secretName"] == made["metadata"]["name"]
    (item,) = volume["secret"]["items"]
    assert item["key"] in made["data"]
    assert f"{mount['mountPath']}/{item['path']}" == environment(text)["HISTOSPEC_TOKEN_FILE"]
    assert mount["name"] == volume["name"]
    shown = "get secret run-histospec-tokens -o jsonpath='{.data.worker-token}' | base64 -d"
    assert text.count(shown) == text.count("get secret") == 2, "to see it, and to copy it"
    assert "name it in tokens.existingSecret" in text
    assert "WARNING: without TLS, tokens and responses are sent unencrypted" in text


def test_notes_of_a_guarded_release_have_no_warning(tmp_path: Path) -> None:
    text = notes(tmp_path, "--values", VALUES / "everything.yaml")
    assert "WARNING" not in text
    assert {"HISTOSPEC_TOKEN_FILE", "HISTOSPEC_TLS_CA", "HISTOSPEC_TLS_CERT"} < environment(text).keys()
    assert environment(text)["HISTOSPEC_ENDPOINT"] == "discover://drafts-headless.rl.svc:6378"
    assert "The chart created" not in text
    assert "port-forward service/drafts-http 9464" in text


def test_notes_say_aloud_what_is_not_safe(tmp_path: Path) -> None:
    text = notes(tmp_path, "--set", "security.insecure=true")
    assert "WARNING: security.insecure is true. The shards ask callers for neither a token nor a certificate." in text
    assert "it admits the pods of this namespace." in text
    assert "HISTOSPEC_TOKEN_FILE" not in environment(text)
    assert "volumes" not in worker(text)
    text = notes(tmp_path, "--set", "security.insecure=true,networkPolicy.enabled=false")
    assert "Any pod that reaches the port can read and write every run's history." in text
    text = notes(tmp_path, "--set", "security.insecure=true,networkPolicy.sameNamespace=false")
    assert "it admits no pods but the chart's own." in text
    assert "WARNING: the history ends with each pod" in notes(tmp_path, "--set", "persistence.enabled=false")


def test_notes_say_that_a_policy_keeps_outside_callers_out(tmp_path: Path) -> None:
    text = notes(tmp_path, "--set", "service.type=LoadBalancer,tls.existingSecret=tls")
    assert (
        "WARNING: service.type is LoadBalancer, but the NetworkPolicy admits only the pods of this namespace." in text
    )
    assert "WARNING" not in notes(tmp_path, "--values", VALUES / "published.yaml")


def test_notes_of_a_daemonset_lead_to_the_own_node(tmp_path: Path) -> None:
    text = notes(tmp_path, "--set", "mode=daemonset")
    assert environment(text)["HISTOSPEC_ENDPOINT"] == "run-histospec.rl.svc:6378"
    assert "Set daemonset.hostPath" in text
    found = environment(notes(tmp_path, "--set", "mode=daemonset,daemonset.hostPort=7000"))
    assert found["HISTOSPEC_ENDPOINT"] == "$(HISTOSPEC_HOST_IP):7000"
    assert found["HISTOSPEC_HOST_IP"] == {"fieldRef": {"fieldPath": "status.hostIP"}}


def test_notes_lead_to_a_name_that_the_certificate_has(tmp_path: Path) -> None:
    port = "mode=daemonset,daemonset.hostPort=7000"
    issued = f"{port},tls.certManager.enabled=true,tls.certManager.issuerRef.name=a"
    for words in (
        issued,
        f"{port},tls.existingSecret=a",
        f"{issued},tls.certManager.extraDnsNames={{drafts.example.org}}",
    ):
        found = environment(notes(tmp_path, "--set", words))
        assert found["HISTOSPEC_ENDPOINT"] == "run-histospec.rl.svc:6378"
        assert "HISTOSPEC_HOST_IP" not in found
    found = environment(notes(tmp_path, "--set", f"{issued},tls.certManager.ipAddresses={{10.0.0.1}}"))
    assert found["HISTOSPEC_ENDPOINT"] == "$(HISTOSPEC_HOST_IP):7000"
    assert found["HISTOSPEC_HOST_IP"] == {"fieldRef": {"fieldPath": "status.hostIP"}}


def test_notes_say_how_prometheus_reaches_the_http_port(tmp_path: Path) -> None:
    warning = "admits no other namespace to the HTTP port"
    assert warning in notes(tmp_path, "--set", "serviceMonitor.enabled=true")
    assert warning not in notes(tmp_path)
    peer = r"networkPolicy.httpFrom[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring"
    assert warning not in notes(tmp_path, "--set", f"serviceMonitor.enabled=true,{peer}")


def test_notes_name_the_secrets_of_teams(tmp_path: Path) -> None:
    assert "-token-NAME" not in notes(tmp_path)
    team = "tokens.callers[0].name=a,tokens.callers[0].namespaces={a-*}"
    assert "run-histospec-token-NAME" in notes(tmp_path, "--set", team)


def test_notes_wait_for_no_rollout_that_a_person_makes(tmp_path: Path) -> None:
    assert "rollout status statefulset/run-histospec" in notes(tmp_path)
    assert "rollout status" not in notes(tmp_path, "--set", "updateStrategy.type=OnDelete")
