"""Tokens as installed: the chart creates them, a real server accepts them, and the notes say how to use them."""

import base64
from pathlib import Path
from typing import Any

import pytest

from histospec.client import DraftClient, PermissionDenied, Response
from tests.support.charts import Manifest, one, options, refusal, render, shard
from tests.support.children import histospec
from tests.support.servers import Starter

SECRET = "run-histospec-tokens"


def contents(manifests: list[Manifest]) -> dict[str, str]:
    data = one(manifests, "Secret")["data"]
    return {key: base64.b64decode(value, validate=True).decode() for key, value in data.items()}


def mounted(spec: Manifest, name: str) -> Any:
    (volume,) = [entry["secret"] for entry in spec["volumes"] if entry["name"] == name]
    return volume["secretName"], volume["items"]


def test_the_chart_makes_tokens_that_upgrades_and_uninstall_keep() -> None:
    manifests = render()
    assert one(manifests, "Secret")["metadata"]["name"] == SECRET
    assert one(manifests, "Secret")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    found = contents(manifests)
    assert found.keys() == {"tokens.toml", "worker-token", "admin-token"}
    for key in ("worker-token", "admin-token"):
        assert len(found[key]) == 40
        assert found[key].isalnum()
        assert found[key] not in found["tokens.toml"], "the server's file holds hashes alone"
    assert found["worker-token"] != found["admin-token"]
    assert found["worker-token"] != contents(render())["worker-token"], "random"


def test_shards_see_the_file_and_no_token() -> None:
    manifests = render()
    assert options(manifests)["tokens"] == "/etc/histospec/tokens/tokens.toml"
    assert "insecure" not in options(manifests)
    assert mounted(shard(manifests), "tokens") == (SECRET, [{"key": "tokens.toml", "path": "tokens.toml"}])


def test_tokens_of_your_own_come_first() -> None:
    manifests = render("--set", "tokens.existingSecret=ours,tokens.key=file.toml")
    assert not [m for m in manifests if m["kind"] == "Secret"]
    assert mounted(shard(manifests), "tokens") == ("ours", [{"key": "file.toml", "path": "tokens.toml"}])


def test_a_service_without_tokens_is_a_choice() -> None:
    assert "tokens.create is false, so any caller could read and write" in refusal("--set", "tokens.create=false")
    for words in ("security.insecure=true", "security.insecure=true,tokens.create=false"):
        manifests = render("--set", words)
        assert options(manifests)["insecure"] is True
        assert "tokens" not in options(manifests)
        assert not [m for m in manifests if m["kind"] == "Secret"]


def test_client_certificates_may_stand_alone() -> None:
    manifests = render("--set", "tokens.create=false,tls.existingSecret=tls,tls.clientCA.existingSecret=ca")
    assert "insecure" not in options(manifests)
    assert "tokens" not in options(manifests)


def test_new_tokens_do_not_restart_shards() -> None:
    def annotations() -> Any:
        return one(render(), "StatefulSet")["spec"]["template"]["metadata"]["annotations"]

    assert annotations() == annotations()


def test_a_server_takes_what_the_chart_made(start_server: Starter, tmp_path: Path) -> None:
    found = contents(render())
    for key, text in found.items():
        (tmp_path / key).write_text(text)
    server = start_server("--tokens", str(tmp_path / "tokens.toml"))

    def client(token: str) -> DraftClient:
        return DraftClient(server.endpoint, namespace="run", token=(tmp_path / token).read_text())

    with client("worker-token") as worker:
        worker.ingest([1, 2, 3], [Response([4, 5, 6])], epoch=1)
        assert [list(response.tokens) for response in worker.history([1, 2, 3])] == [[4, 5, 6]]
        with pytest.raises(PermissionDenied, match="no right to admin"):
            worker.drop_namespace()
    with client("admin-token") as admin:
        assert [list(response.tokens) for response in admin.history([1, 2, 3])] == [[4, 5, 6]]
        admin.drop_namespace()


def test_helm_test_gets_in_with_the_made_token(start_server: Starter, tmp_path: Path) -> None:
    manifests = render()
    spec = one(manifests, "Pod")["spec"]
    assert mounted(spec, "token") == (SECRET, [{"key": "worker-token", "path": "worker-token"}])
    (mount,) = spec["containers"][0]["volumeMounts"]
    found = contents(manifests)
    (tmp_path / "tokens.toml").write_text(found["tokens.toml"])
    (tmp_path / "worker-token").write_text(found["worker-token"])
    server = start_server("--tokens", str(tmp_path / "tokens.toml"))
    words = [word.replace(mount["mountPath"], str(tmp_path)) for word in spec["containers"][0]["args"]]
    assert words[1] == "discover://run-histospec-headless.rl.svc:6378"
    words[1] = server.endpoint
    code, said = histospec(*words, f"--http={server.http}").end()
    assert code == 0, said
    without = [word for word in words if not word.startswith("--token-file")]
    assert histospec(*without, f"--http={server.http}").end()[0] != 0


def test_helm_test_is_there_only_where_it_can_get_in() -> None:
    def args(*words: str) -> Any:
        pods = [m for m in render("--set", ",".join(words)) if m["kind"] == "Pod"]
        return pods[0]["spec"]["containers"][0]["args"] if pods else None

    token = "--token-file=/etc/histospec/token/worker-token"
    assert token in args("replicas=1")
    assert token not in args("security.insecure=true")
    assert args("tokens.existingSecret=ours") is None
    assert args("tls.existingSecret=tls") is None
    tls = args("tls.existingSecret=tls", "test.existingSecret=tls", "test.args={--tls-ca=/etc/histospec/client/ca.crt}")
    assert tls[-2:] == [token, "--tls-ca=/etc/histospec/client/ca.crt"]
    published = args("mode=daemonset", "service.type=NodePort", "tls.existingSecret=tls", "test.args={--tls-ca=ca}")
    assert published[1:3] == ["run-histospec.rl.svc:6378", "--http=run-histospec-http.rl.svc:9464"]
