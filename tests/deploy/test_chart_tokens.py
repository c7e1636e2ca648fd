"""Tokens as installed: the chart creates them, a real server accepts them, and the notes say how to use them."""

import base64
import json
import re
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from histospec.client import DraftClient, PermissionDenied, Response
from tests.support.charts import CHART, Manifest, one, options, refusal, render, shard
from tests.support.children import histospec
from tests.support.servers import Starter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

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


CALLERS: Any = [
    {"name": "team-a", "namespaces": ["a-*"], "shares": {"store": "20GiB", "sessions": 1000}},
    {"name": "team-b", "namespaces": ["b-*", 'b"c'], "rights": ["read"]},
]


def with_callers(folder: Path, callers: Any, live: list[Manifest] | None = None) -> list[Manifest]:
    """Returns the Secrets of the chart. `live`: the Secrets that its look-ups find, as the last upgrade left them."""
    chart = folder / "chart"
    if not chart.exists():
        shutil.copytree(CHART, chart)
        template = chart / "templates" / "secret.yaml"
        found, count = re.subn(
            r'lookup "v1" "Secret" \$?\.Release\.Namespace', "index $.Values.global.secrets", template.read_text()
        )
        assert count == 2
        template.write_text(found)
    owner = {"meta.helm.sh/release-name": "run"}
    secrets = {
        secret["metadata"]["name"]: secret
        | {"metadata": secret["metadata"] | {"annotations": secret["metadata"]["annotations"] | owner}}
        for secret in live or []
    }
    values = folder / "values.yaml"
    values.write_text(json.dumps({"global": {"secrets": secrets}, "tokens": {"callers": callers}}))
    return [m for m in render("--values", values, chart=chart) if m["kind"] == "Secret"]


def decoded(secrets: list[Manifest]) -> dict[str, dict[str, str]]:
    return {
        secret["metadata"]["name"].removeprefix("run-histospec-"): {
            key: base64.b64decode(value).decode() for key, value in secret["data"].items()
        }
        for secret in secrets
    }


def named(secrets: list[Manifest]) -> list[tuple[str, str]]:
    """Returns the names of the tokens in the server's file, and for which secret each is."""
    found = decoded(secrets)
    known = {sha256(text.encode()).hexdigest(): text for keys in found.values() for text in keys.values()}
    file = tomllib.loads(found["tokens"]["tokens.toml"])
    return [(token["name"], known[token["sha256"]]) for token in file["token"]]


def test_each_team_has_a_token_for_its_namespaces_alone(start_server: Starter, tmp_path: Path) -> None:
    """A server takes the file: a team reaches its own namespaces, and its share bounds it."""
    found = decoded(with_callers(tmp_path, CALLERS))
    (tmp_path / "tokens.toml").write_text(found["tokens"]["tokens.toml"])
    server = start_server("--tokens", str(tmp_path / "tokens.toml"))

    def client(team: str, namespace: str) -> DraftClient:
        return DraftClient(server.endpoint, namespace=namespace, token=found[f"token-team-{team}"]["token"])

    with client("a", "a-1") as mine, client("b", "a-1") as theirs, client("b", "b-1") as reader:
        mine.ingest([1, 2, 3], [Response([4, 5, 6])], epoch=1)
        with pytest.raises(PermissionDenied, match="token 'team-b' has no right to read in namespace 'a-1'"):
            theirs.history([1, 2, 3])
        with pytest.raises(PermissionDenied, match="token 'team-b' has no right to write"):
            reader.ingest([1, 2, 3], [Response([4, 5, 6])], epoch=1)
    (tenant,) = [one for one in json.loads(server.get("/status")[1])["tenants"] if one["name"] == "team-a"]
    assert (tenant["namespaces"], tenant["store_share"], tenant["sessions_share"]) == (1, 20 << 30, 1000)


def test_upgrades_keep_the_tokens_of_teams_and_add_and_remove_those_of_others(tmp_path: Path) -> None:
    first = with_callers(tmp_path, CALLERS)
    same = with_callers(tmp_path, CALLERS, first)
    assert decoded(same) == decoded(first)
    assert [name for name, _ in named(same)] == ["workers", "admin", "team-a", "team-b"]
    more = with_callers(tmp_path, [{"name": "team-c", "namespaces": ["c"]}, *CALLERS[:1]], same)
    assert [name for name, _ in named(more)] == ["workers", "admin", "team-c", "team-a"]
    assert decoded(more)["token-team-a"] == decoded(first)["token-team-a"]
    assert "token-team-b" not in decoded(more), "Helm deletes it"
    none = with_callers(tmp_path, [], more)
    assert [name for name, _ in named(none)] == ["workers", "admin"]
    assert decoded(none)["tokens"]["worker-token"] == decoded(first)["tokens"]["worker-token"]


def test_a_release_without_teams_gets_them_and_keeps_what_a_person_changed(tmp_path: Path) -> None:
    before = with_callers(tmp_path, [])
    (secret,) = before
    edited = base64.b64encode(b"# mine\n").decode()
    secret["data"] |= {"tokens.toml": edited, "mine": edited}
    (kept,) = with_callers(tmp_path, [], before)
    assert kept["data"] == secret["data"]
    after = decoded(with_callers(tmp_path, CALLERS, before))["tokens"]
    assert after["mine"] == "# mine\n"
    assert "# mine" not in after["tokens.toml"], "docs/teams.md says that the chart writes it"
    assert after["worker-token"] == decoded(before)["tokens"]["worker-token"]


def test_a_token_is_replaced_by_name_in_two_steps(tmp_path: Path) -> None:
    """1. A new token, and the old one stays. 2. The old one ends. Other teams notice nothing."""
    first = with_callers(tmp_path, CALLERS)
    old = decoded(first)["token-team-a"]["token"]
    rotated: Any = [CALLERS[0] | {"rotation": 1}, CALLERS[1]]
    second = with_callers(tmp_path, rotated, first)
    new = decoded(second)["token-team-a"]
    assert new["token"] != old
    assert new["previous-token"] == old
    assert [pair for pair in named(second) if pair[0] == "team-a"] == [("team-a", new["token"]), ("team-a", old)]
    assert decoded(with_callers(tmp_path, rotated, second)) == decoded(second), "an upgrade for another reason"
    third = with_callers(tmp_path, [rotated[0] | {"previous": False}, CALLERS[1]], second)
    assert decoded(third)["token-team-a"] == {"token": new["token"]}
    assert [name for name, _ in named(third)] == ["workers", "admin", "team-a", "team-b"]
    assert decoded(third)["token-team-b"] == decoded(first)["token-team-b"]


def test_teams_are_for_tokens_that_the_chart_makes() -> None:
    team = "tokens.callers[0].name=a,tokens.callers[0].namespaces={a-*}"
    assert "the chart makes no tokens here" in refusal("--set", f"{team},tokens.existingSecret=ours")
    twice = "tokens.callers[1].name=a,tokens.callers[1].namespaces={b-*}"
    assert "the name a appears twice" in refusal("--set", f"{team},{twice}")
