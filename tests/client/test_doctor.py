"""Faults in real processes: the doctor names each, says what to do, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import trustme

from histospec.client import DraftClient, Response
from histospec.client.config import configure
from histospec.client.doctor.checks import examine
from histospec.client.doctor.facts import Demand, gather
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support import certificates
from tests.support.ports import free_port
from tests.support.servers import Server, Starter
from tests.support.slow_link import SlowLink

PATIENCE = ("--timeout", "60")
"""Timeout for servers that answer. Tests of others use less."""
TOKENS = """
[[token]]
name = "trainer"
secret = "trainer-secret-0123456789"
namespaces = ["run-*"]

[[token]]
name = "reader"
secret = "reader-secret-0123456789"
rights = ["read"]
"""


class Report:
    """The doctor's exit code, and its findings that are not ok."""

    def __init__(self, code: int, told: dict[str, Any]) -> None:
        self.code = code
        self.findings: list[dict[str, str]] = told["findings"]
        self.faults = [f for f in self.findings if f["level"] != "ok"]

    def only(self, level: str, check: str) -> str:
        """Returns the text and advice of the only fault."""
        assert [(f["level"], f["check"]) for f in self.faults] == [(level, check)], self.faults
        assert self.code == (1 if level == "bad" else 0)
        assert self.faults[0]["advice"]
        return "{text}; {advice}".format(**self.faults[0])


def run_doctor(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`python -m histospec.client.doctor`, as in a worker's container."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HISTOSPEC_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-m", "histospec.client.doctor", *words],
        cwd="/",
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def doctor(endpoint: str, namespace: str = "run-1", *words: str, **variables: str) -> Report:
    settings = {"HISTOSPEC_ENDPOINT": endpoint, "HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_DEADLINE": "30"}
    done = run_doctor("--json", *PATIENCE, *words, **settings | variables)
    assert done.stderr == ""
    return Report(done.returncode, json.loads(done.stdout))


def fill(server: Server, namespace: str, prompts: Sequence[int], epoch: int = 0) -> None:
    with DraftClient(server.endpoint, namespace, deadline=60.0) as client:
        for prompt in prompts:
            client.ingest([1, prompt], [Response([5, 6, 7])], epoch=epoch)


def with_sitecustomize(folder: Path, code: str) -> dict[str, str]:
    """Returns the environment of a server whose Python runs this code first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return certificates.issue(tmp_path, trustme.CA())


@pytest.fixture
def guarded(start_server: Starter, tmp_path: Path) -> Server:
    """A server that requires tokens."""
    (tmp_path / "tokens.toml").write_text(TOKENS)
    return start_server("--tokens", str(tmp_path / "tokens.toml"))


def test_nothing_is_wrong(shared_server: Server) -> None:
    fill(shared_server, "fine", range(5), epoch=2)
    report = doctor(shared_server.endpoint, "fine")
    assert (report.code, report.faults) == (0, [])
    checks = ["endpoint", "token", "version", "namespace", "limits", "step", "clock", "vllm", "runner"]
    assert [finding["check"] for finding in report.findings][:7] == checks[:7]
    assert {finding["check"] for finding in report.findings} <= set(checks)
    said = {finding["check"]: finding["text"] for finding in report.findings}
    assert said["namespace"] == "'fine' has 5 responses to 5 problems, the newest of epoch 2"
    assert said["step"].startswith("20 steps took ")
    new = doctor(shared_server.endpoint, "another")
    assert (new.code, new.faults) == (0, [])


def test_it_leaves_nothing_behind(server: Server) -> None:
    fill(server, "run-1", range(3))
    with DraftClient(server.endpoint, "run-1") as client:
        before = client.inspect(60.0)[0].namespace
    assert doctor(server.endpoint, "run-1").code == doctor(server.endpoint, "absent").code == 0
    with DraftClient(server.endpoint, "run-1") as client:
        assert client.inspect(60.0)[0].namespace == before
    metrics = server.metrics()
    assert not [name for name in metrics if "absent" in name]
    assert metrics["histospec_sessions"] == 0
    ended = server.logged("draft stream ended", 2)
    assert [line["steps"] for line in ended] == [21, 21]
    assert [line["opened"] for line in ended] == [0, 0]


def test_a_wrong_host_name() -> None:
    text = doctor("no-such-host.invalid:6378").only("bad", "endpoint")
    assert "no-such-host.invalid" in text
    found = doctor("discover://no-such-host.invalid:6378").only("bad", "endpoint")
    assert "no-such-host.invalid" in found


def test_a_port_where_nothing_listens() -> None:
    text = doctor(f"127.0.0.1:{free_port()}").only("bad", "endpoint")
    assert "connection refused; is the server running there" in text


def test_the_http_port(shared_server: Server) -> None:
    assert "it speaks HTTP/1, not gRPC; is this the server's HTTP port" in doctor(shared_server.http).only(
        "bad", "endpoint"
    )


def test_tls_on_one_side_only(start_server: Starter, server: Server, files: Path) -> None:
    encrypted = start_server(*certificates.of_server(files))
    assert "it speaks TLS, and this client plain text" in doctor(encrypted.endpoint).only("bad", "endpoint")
    ca = str(files / "ca.pem")
    report = doctor(server.endpoint, HISTOSPEC_TLS_CA=ca)
    assert "it speaks plain text, and this client TLS" in report.only("bad", "endpoint")
    assert doctor(encrypted.endpoint, HISTOSPEC_TLS_CA=ca).faults == []
    assert doctor(encrypted.endpoint, "run-1", "--tls-ca", ca).faults == []
    assert "does not accept the server's certificate" in doctor(encrypted.endpoint, "run-1", "--tls").only(
        "bad", "endpoint"
    )


def test_no_token_and_a_wrong_one(guarded: Server) -> None:
    assert "the server refuses calls without a token; set HISTOSPEC_TOKEN" in doctor(guarded.endpoint).only(
        "bad", "token"
    )
    report = doctor(guarded.endpoint, HISTOSPEC_TOKEN="guessed-secret-0123456789")
    assert "the server refuses the token" in report.only("bad", "token")


def test_a_token_for_another_namespace(guarded: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("trainer-secret-0123456789")
    words = ("--token-file", str(tmp_path / "token"))
    assert doctor(guarded.endpoint, "run-7", *words).faults == []
    text = doctor(guarded.endpoint, "walk-7", *words).only("bad", "token")
    assert "the token is valid, but not for namespace 'walk-7'; correct HISTOSPEC_NAMESPACE" in text


def test_a_token_that_may_not_write(guarded: Server) -> None:
    text = doctor(guarded.endpoint, HISTOSPEC_TOKEN="reader-secret-0123456789").only("bad", "token")
    assert "the token may only read in namespace 'run-1': the server stores no responses" in text


def test_a_namespace_that_is_written_otherwise(server: Server) -> None:
    fill(server, "train", range(3))
    said = "'trian' has no responses, but 'train' exists; use one HISTOSPEC_NAMESPACE"
    assert said in doctor(server.endpoint, "trian").only("warn", "namespace")
    with DraftClient(server.endpoint, "trian", deadline=60.0) as client:  # a worker is at it already
        client.step(client.open([[9, 9]]), [[5]])
    assert said in doctor(server.endpoint, "trian").only("warn", "namespace")


def test_the_same_prompts_in_another_namespace(server: Server) -> None:
    fill(server, "monday", range(10))
    fill(server, "tuesday", range(4, 10))
    text = doctor(server.endpoint, "tuesday").only("warn", "prompts")
    assert "6 of its 6 newest prompts also have responses in 'monday'" in text
    with DraftClient(server.endpoint, "tuesday", deadline=60.0) as client:  # prompts come back: another run before it
        client.step(client.open([[1, 5]]), [[5]])
    assert doctor(server.endpoint, "tuesday").faults == []


def test_prompts_that_never_come_back(server: Server) -> None:
    fill(server, "run-1", range(3), epoch=4)
    with DraftClient(server.endpoint, "run-1", deadline=60.0) as client:
        client.step(client.open([[2, number] for number in range(70)]), [[5]] * 70)
    text = doctor(server.endpoint).only("warn", "lookups")
    assert "none of 70 sessions was opened on a prompt that has responses" in text


def test_a_clock_that_is_an_hour_off(start_server: Starter, tmp_path: Path) -> None:
    late = "import time\ntrue = time.time\ntime.time = lambda: true() - 3600\n"
    server = start_server(env=with_sitecustomize(tmp_path / "site", late))
    text = doctor(server.endpoint).only("warn", "clock")
    assert "the server's clock is 1 h 0 min behind this machine's; set both by NTP" in text


def test_a_server_of_another_version(start_server: Starter, tmp_path: Path) -> None:
    code = (
        "from importlib import metadata\n"
        "true = metadata.version\n"
        "metadata.version = lambda name: '7.3.1' if name == 'histospec' else true(name)\n"
    )
    server = start_server(env=with_sitecustomize(tmp_path / "site", code))
    mine = metadata.version("histospec")
    assert f"the server has 7.3.1, this client {mine}" in doctor(server.endpoint).only("warn", "version")


def test_limits_below_what_vllm_asks_for(start_server: Starter) -> None:
    server = start_server("--max-draft-tokens", "8", "--max-sessions-per-stream", "100")
    report = doctor(server.endpoint, "run-1", "--draft-tokens", "32", "--sequences", "512")
    assert [(fault["level"], fault["check"]) for fault in report.faults] == [("warn", "limits")] * 2
    assert report.code == 0
    assert "the server drafts at most 8 tokens; vLLM asks for 32 (num_speculative_tokens)" in report.faults[0]["text"]
    assert "the server takes 94 sequences of a worker; vLLM runs 512 (max_num_seqs)" in report.faults[1]["text"]
    assert doctor(server.endpoint, "run-1", "--draft-tokens", "8", "--sequences", "94").faults == []


def test_a_server_that_is_too_far_away(server: Server) -> None:
    with SlowLink(server.endpoint, 0.05) as link:
        text = doctor(link.address, HISTOSPEC_DEADLINE="0.02").only("bad", "step")
        assert "the deadline is 20.0 ms; drafts arrive too late; move the server nearer to the worker" in text
        assert doctor(link.address).faults == []


def test_a_server_that_hangs(server: Server) -> None:
    server.signal(signal.SIGSTOP)
    try:
        text = doctor(server.endpoint, "run-1", "--timeout", "1").only("bad", "endpoint")
        assert "it accepts the connection, but says nothing within 1 s" in text
    finally:
        server.signal(signal.SIGCONT)


def test_a_server_that_is_still_reading_its_store(start_server: Starter, tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "full", history_epochs=8)
    written = [
        store.append(ResponseBatch(Problem("run", i.to_bytes(4, "little")), [Record(bytes(8000), 0)]))
        for i in range(8000)
    ]
    written[-1].result()
    store.close()
    server = start_server(name="full", ready=False)
    facts = asyncio.run(gather(configure(server.endpoint, "run"), Demand(), 60.0))
    (finding,) = [one for one in examine(facts) if one.check == "loading"]
    assert finding.level == "warn"
    assert finding.text == "the server is still loading its store; until then it reports fewer responses than it has"


def test_a_store_whose_files_are_gone(start_server: Starter, tmp_path: Path) -> None:
    server = start_server(name="gone")
    fill(server, "run-1", range(2))
    (tmp_path / "gone").rename(tmp_path / "moved")
    text = doctor(server.endpoint).only("bad", "store")
    assert "the server cannot store responses: store: " in text


def test_one_shard_of_two_is_away(server: Server) -> None:
    report = doctor(f"a={server.endpoint},b=127.0.0.1:{free_port()}")
    assert "connection refused" in report.only("bad", "endpoint")
    assert {f["check"]: f["shard"] for f in report.findings if f["level"] == "ok"}["step"] == "a"


def test_a_shard_that_the_list_lacks(start_server: Starter) -> None:
    first = start_server("--shard-name", "a", name="a")
    second = start_server("--shard-name", "b", "--peers", f"a={first.endpoint}", name="b")
    text = doctor(f"b={second.endpoint}").only("warn", "shards")
    assert f"does not list: a at {first.endpoint}" in text
    both = doctor(f"a={first.endpoint},b={second.endpoint}")
    assert both.faults == []
    assert [f["shard"] for f in both.findings if f["check"] == "token"] == [""]  # said once of both
    port = second.endpoint.rpartition(":")[2]
    found = doctor(f"discover://127.0.0.1:{port}")
    assert found.faults == []
    assert len([f for f in found.findings if f["check"] == "endpoint"]) == 2


def test_a_shard_that_is_listed_by_another_name(start_server: Starter) -> None:
    port = free_port()
    flags = ("--listen", f"127.0.0.1:{port}", "--shard-name", "a", "--peers", f"a=shard-a.example:{port}")
    server = start_server(*flags)
    assert doctor(server.endpoint).faults == []


def test_a_worker_whose_variables_are_wrong(shared_server: Server) -> None:
    report = doctor(shared_server.endpoint, HISTOSPEC_VERIFY_COST="cheap")
    assert "HISTOSPEC_VERIFY_COST: expected 'auto' or a number" in report.only("bad", "settings")
