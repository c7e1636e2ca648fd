"""The `histospec` command from the user's side."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from histospec.client import DraftClient, Response, Tls
from tests.support import certificates, children
from tests.support.servers import Server, Starter
from tests.support.wires import Wire


def histospec(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HISTOSPEC_")}
    return subprocess.run(
        [sys.executable, "-m", "histospec.server", *words],
        cwd="/",
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_commands(word: str) -> None:
    result = histospec(word)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(f"  {command} " in result.stdout for command in ("serve", "replay", "status"))


def test_version() -> None:
    assert histospec("--version").stdout.startswith("histospec 0.")


def test_no_command_or_a_wrong_one() -> None:
    assert histospec().returncode == 2
    result = histospec("surve")
    assert result.returncode == 2
    assert (
        result.stderr == "histospec: unknown command 'surve'; use one of "
        "serve, run, replay, snapshot, restore, forget, bench, doctor, status\n"
    )


def test_doctor_is_one_of_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_DEADLINE", "30")
    result = histospec("doctor", "--endpoint", server.endpoint, "--namespace", "run-1", "--timeout", "60")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{server.endpoint}, namespace 'run-1'\n\n  ok    endpoint ")
    assert result.stdout.endswith("\nNo problem found.\n")
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "endpoint: pass the server's address, such as 'host:6378,host2:6378', or set HISTOSPEC_ENDPOINT"),
        (("--endpoint", "here:1"), "namespace: pass the name of the training run, such as 'run-1', or set"),
        (("--endpoint", "here", "--namespace", "run"), "endpoint: 'here' is not of the form host:port or name="),
        (("--timeout", "0"), "argument --timeout: must be a number of seconds, above 0 and at most 3600, is '0'"),
        (("--sequences", "many"), "argument --sequences: must be a whole number from 1, is 'many'"),
        (("--namespaec", "x"), "unrecognized arguments: --namespaec; see histospec doctor --help"),
        (("--token-file", "/none"), "HISTOSPEC_TOKEN_FILE: cannot read /none: No such file or directory"),
        (("--tls-ca", "/none"), "tls: cannot read /none: No such file or directory"),
        (("--tls-cert", "/none"), "tls: a client certificate needs its key, and a key its certificate"),
    ],
)
def test_doctor_refuses_what_it_cannot_use(flags: tuple[str, ...], sentence: str) -> None:
    whole = ("--endpoint", "here:1", "--namespace", "run") if flags and flags[0] != "--endpoint" else ()
    result = histospec("doctor", *whole, *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"histospec doctor: {sentence}")
    assert result.stderr.count("\n") == 1


def test_serve_help_names_every_option() -> None:
    text = histospec("serve", "--help").stdout
    for flag in ("--listen", "--data-dir", "--memory", "--peers", "--insecure", "--history-epochs", "--drain-seconds"):
        assert flag in text
    words = " ".join(text.split())
    assert "(default: 256MiB)" in words
    assert "(default: 8GiB, or what fits the memory of the control group or machine)" in words
    assert "(default: 90 % of what the volume of --data-dir has free, and the file itself)" in words


def test_status_of_a_running_server(server: Server, wire: Wire) -> None:
    wire.ingest([1, 2, 3], [range(30)])
    wire.stream().ask(opens=[wire.open(1)], step=wire.step([1], [[0, 1, 2]]))
    result = histospec("status", server.endpoint, "--http", server.http)
    assert (result.returncode, result.stderr) == (0, "")
    for text in (server.endpoint, "SERVING", "1 of 1 (100%)", "tokens of history", "30"):
        assert text in result.stdout
    result = histospec("status", server.endpoint, "--http", "127.0.0.1:1")
    assert result.returncode == 0
    assert "give their HTTP addresses with --http" in result.stdout


def test_status_as_json_is_what_each_shard_says(start_server: Starter) -> None:
    """Two shards, found through one, through a list, and through a name; a shard listed twice appears once."""
    first = start_server("--shard-name", "a", name="a")
    second = start_server("--shard-name", "b", "--peers", f"a={first.endpoint}", name="b")
    http = f"{first.http},{second.http}"
    port = second.endpoint.rpartition(":")[2]
    for endpoint in (second.endpoint, f"a={first.endpoint},{second.endpoint}", f"discover://localhost:{port}"):
        result = histospec("status", endpoint, "--http", http, "--json")
        assert (result.returncode, result.stderr) == (0, "")
        shards = {shard["name"]: shard for shard in json.loads(result.stdout)["shards"]}
        assert {name: shard["health"] for name, shard in shards.items()} == {"a": "SERVING", "b": "SERVING"}
        assert [shards[name]["status"]["shard"] for name in ("a", "b")] == ["a", "b"]


def test_status_of_a_listed_shard_that_is_down(server: Server) -> None:
    result = histospec("status", f"a=127.0.0.1:1,{server.endpoint}", "--http", server.http, "--timeout", "2")
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stdout
    assert "SERVING" in result.stdout
    assert "no status from a: give" in result.stdout


def test_status_obeys_nothing_that_a_namespace_is_named(server: Server, wire: Wire) -> None:
    wire.ingest([1], [[2]], namespace="[red]\x1b[2J")
    result = histospec("status", server.endpoint, "--http", server.http)
    assert "[red]�[2J" in result.stdout
    assert "\x1b" not in result.stdout


def test_status_looks_again_until_interrupted(server: Server) -> None:
    with children.histospec("status", server.endpoint, "--http", server.http, "--watch", "0.1") as watching:
        watching.wait_for("SERVING", times=3)
        watching.send_signal(signal.SIGINT)
        code, text = watching.end()
    assert code == 130
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "flags", [["--watch", "0"], ["--timeout", "inf"], ["--http", "nowhere"], ["--tls-ca", "/none"]]
)
def test_status_refuses_what_it_cannot_use(flags: list[str]) -> None:
    result = histospec("status", "127.0.0.1:1", *flags)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


def test_status_of_a_shard_that_is_down(start_server: Starter) -> None:
    server = start_server("--peers", "127.0.0.1:1")
    result = histospec("status", server.endpoint, "--http", server.http, "--timeout", "2")
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stdout


def test_status_of_a_shard_that_listens_everywhere(start_server: Starter) -> None:
    server = start_server("--listen", "0.0.0.0:0", "--insecure", "--shard-name", "shard-0")
    reached = server.endpoint.replace("0.0.0.0", "127.0.0.2")
    result = histospec("status", reached, "--http", server.http)
    assert (result.returncode, result.stderr) == (0, "")
    assert reached in result.stdout
    assert "0.0.0.0:" not in result.stdout


def test_status_of_nobody() -> None:
    result = histospec("status", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr == (
        "histospec status: 127.0.0.1:1 cannot be reached: connection refused; "
        "is the server running there, and is this its port?\n"
    )
    assert histospec("status", "nowhere").returncode == 2
    result = histospec("status")
    assert result.returncode == 2
    assert "HISTOSPEC_ENDPOINT" in result.stderr


def test_status_and_doctor_find_the_endpoint_of_workers(server: Server) -> None:
    """As an argument, or in their variable."""
    told = histospec("status", "--http", server.http, HISTOSPEC_ENDPOINT=server.endpoint)
    assert (told.returncode, told.stderr) == (0, "")
    assert server.endpoint in told.stdout
    for words, variables in (
        ([server.endpoint], {}),
        (["--endpoint", server.endpoint], {}),
        ([server.endpoint], {"HISTOSPEC_ENDPOINT": "127.0.0.1:1"}),
        ([], {"HISTOSPEC_ENDPOINT": server.endpoint}),
    ):
        told = histospec("doctor", *words, "--namespace", "run", **variables)
        assert server.endpoint in told.stdout, told.stderr
        assert "refused" not in told.stdout
    told = histospec("doctor", "h:1", "--endpoint", "h:2", "--namespace", "run")
    assert told.returncode == 2
    assert "--endpoint: there is an ENDPOINT without it; give one of them" in told.stderr


BENCH = ("--batch", "4", "--steps", "5", "--interval", "0", "--deadline", "5", "--problems", "2", "--length", "50")


def test_certificates_come_from_options_and_variables_together(start_server: Starter, tmp_path: Path) -> None:
    files = certificates.issue(tmp_path, trustme.CA())
    given = {"ca": files / "ca.pem", "cert": files / "client.pem", "key": files / "client.key"}
    server = start_server(*certificates.of_server(files), "--tls-client-ca", str(given["ca"]))
    with DraftClient(server.endpoint, "run", tls=Tls(*given.values())) as client:
        client.ingest([1], [Response([2])])
    file = str(tmp_path / "file.jsonl")
    for option, command in (
        ("ca", ("status", server.endpoint, "--http", server.http, "--timeout", "60")),
        ("key", ("status", server.endpoint, "--http", server.http, "--timeout", "60")),
        ("ca", ("bench", server.endpoint, *BENCH)),
        ("ca", ("snapshot", file, "--from", server.endpoint)),
        ("cert", ("restore", file, "--to", server.endpoint, "--merge")),
        ("cert", ("doctor", server.endpoint, "--namespace", "run", "--timeout", "60")),
    ):
        variables = {f"HISTOSPEC_TLS_{name.upper()}": str(path) for name, path in given.items()}
        variables[f"HISTOSPEC_TLS_{option.upper()}"] = "/none"  # the option wins
        told = histospec(*command, f"--tls-{option}", str(given[option]), **variables)
        assert told.returncode == 0, (command, told.stderr, told.stdout)


@pytest.mark.parametrize("command", [["status"], ["bench"], ["snapshot", "file", "--from"], ["doctor"]])
def test_a_key_without_its_certificate_is_refused_with_its_source(command: list[str]) -> None:
    for options, source in (
        (["--tls-key", "/none"], "--tls-key"),
        (["--tls-ca", "/none", "--tls-key", "/none"], "--tls-key"),
        (["--tls-ca", "/none"], "HISTOSPEC_TLS_CERT"),
    ):
        variables = {source: "/none"} if source.startswith("HISTOSPEC") else {}
        told = histospec(*command, "here:1", *options, HISTOSPEC_NAMESPACE="run", **variables)
        assert told.returncode == 2
        wrong = "tls: a client certificate needs its key, and a key its certificate"
        assert told.stderr == f"histospec {command[0]}: {wrong}; only {source} is given\n"


def test_status_explains_a_wrong_port_as_the_doctor_does(start_server: Starter, tmp_path: Path) -> None:
    plain = start_server()
    files = certificates.issue(tmp_path, trustme.CA())
    guarded = start_server("--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server.key"))
    authority = ("--tls-ca", str(files / "ca.pem"))
    for words, reason in (
        ([plain.http], "it speaks HTTP/1, not gRPC; is this the server's HTTP port"),
        ([guarded.endpoint], "it speaks TLS, and this client plain text; set HISTOSPEC_TLS_CA"),
        ([plain.endpoint, *authority], "it speaks plain text, and this client TLS; unset HISTOSPEC_TLS_CA"),
    ):
        told = histospec("status", *words, "--timeout", "20")
        assert told.returncode == 1
        *_, last = told.stderr.splitlines()  # gRPC may log a line of its own before
        assert last.startswith(f"histospec status: {words[0]} cannot be reached: {reason}")
    assert histospec("status", guarded.endpoint, *authority, "--http", guarded.http).returncode == 0
