"""The log lines of a stepping client about missing or wrong servers, with real sockets and real servers."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from histospec.client import AsyncDraftClient, Breaker, DraftClient
from histospec.client.transport import diagnosis
from tests.support import certificates
from tests.support.ports import free_port
from tests.support.servers import Server, Starter, secret, with_tokens
from tests.support.waiting import eventually, until

PROMPT = [11, 12, 13]
QUICK = Breaker(cooldown=0.02, cooldown_max=0.1)
PATIENT = 2.0
ADVICE = "going on WITHOUT drafts; is HISTOSPEC_ENDPOINT right? "


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """said() returns the lines of HistoSpec's log so far, with their levels."""
    caplog.set_level(logging.INFO, "histospec")
    return lambda: [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name.startswith("histospec")]


def lines_of(client: DraftClient, said: Callable[[], list[str]], count: int = 1) -> list[str]:
    """Returns the first lines of a client, which steps until they are logged."""
    sessions = client.open([PROMPT])
    eventually(lambda: client.step(sessions, [[1]]) and len(said()) >= count)
    return said()


def test_nothing_listens(said: Callable[[], list[str]]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with DraftClient(endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        (line,) = lines_of(client, said)
        assert line.startswith(
            f"WARNING HistoSpec: no server at {endpoint} (connection refused), {ADVICE}Is the server"
        )
        sessions = client.open([PROMPT])
        for _ in range(200):
            client.step(sessions, [[1]])
        assert client.stats().failed > 1
    assert said() == [line]


def test_a_server_that_comes_goes_and_comes(start_server: Starter, said: Callable[[], list[str]]) -> None:
    with DraftClient(f"127.0.0.1:{free_port()}", "run", breaker=QUICK, deadline=PATIENT) as client:
        (endpoint,) = client.config.endpoints
        lines_of(client, said)
        server = start_server("--listen", endpoint.address)
        assert lines_of(client, said, 2)[1].startswith("INFO HistoSpec: drafting again after ")
    server.restart()
    with DraftClient(server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        assert lines_of(client, said, 3)[2] == f"INFO HistoSpec: connected to {server.endpoint}, namespace run"
        server.kill()
        assert f"no server at {server.endpoint} (connection refused)" in lines_of(client, said, 4)[3]
        server.restart()
        again = lines_of(client, said, 5)[4]
        assert again.startswith("INFO HistoSpec: drafting again after ")
        assert again.endswith(f" s, from {server.endpoint}")


def test_the_http_port(shared_server: Server, said: Callable[[], list[str]]) -> None:
    with DraftClient(shared_server.http, "run", breaker=QUICK, deadline=PATIENT) as client:
        (line,) = lines_of(client, said)
    assert (
        f"no server at {shared_server.http} (it speaks HTTP/1, not gRPC), {ADVICE}Is this the server's HTTP port"
        in line
    )


def test_a_name_that_does_not_resolve(said: Callable[[], list[str]]) -> None:
    with DraftClient("a=no-such-host.invalid:6378", "run", breaker=QUICK, deadline=PATIENT) as client:
        (line,) = lines_of(client, said)
    assert "HistoSpec: no server at no-such-host.invalid:6378, shard a (" in line


def test_nothing_is_found(said: Callable[[], list[str]]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with DraftClient(f"discover://{endpoint}", "run", breaker=QUICK, deadline=0.05) as client:
        (line,) = lines_of(client, said)
    assert f"HistoSpec: no server at {endpoint} (connection refused), {ADVICE}" in line


def test_tls_on_one_side(start_server: Starter, tmp_path: Path, server: Server, said: Callable[[], list[str]]) -> None:
    files = certificates.issue(tmp_path, trustme.CA())
    encrypted = start_server(*certificates.of_server(files), name="encrypted")
    with DraftClient(encrypted.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        (line,) = lines_of(client, said)
    assert "(it speaks TLS, and this client plain text), going on WITHOUT drafts; set HISTOSPEC_TLS_CA" in line
    with DraftClient(server.endpoint, "run", tls=True, breaker=QUICK, deadline=PATIENT) as client:
        line = lines_of(client, said, 2)[1]
    assert "(it speaks plain text, and this client TLS), going on WITHOUT drafts; unset HISTOSPEC_TLS_CA" in line


def test_a_token_of_another_namespace(start_server: Starter, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "workers"\nsecret = "0123456789abcdef"\nnamespaces = ["run-*"]\n')
    endpoint = start_server("--tokens", str(tokens)).endpoint
    with DraftClient(endpoint, "test", token="0123456789abcdef", breaker=QUICK, deadline=PATIENT) as client:
        (line,) = lines_of(client, said)
    assert f"HistoSpec: {endpoint} does not let this client in (token 'workers' has no right to read in namesp" in line
    assert "are HISTOSPEC_TOKEN and HISTOSPEC_NAMESPACE right?" in line
    with DraftClient(endpoint, "run-1", breaker=QUICK, deadline=PATIENT) as client:
        line = lines_of(client, said, 2)[1]
    assert "(authorization: the call has no bearer token; set HISTOSPEC_TOKEN), going on WITHOUT" in line


def test_a_token_file_that_is_away_when_the_stream_breaks(
    start_server: Starter, tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mounted Secret is away for a moment while it changes."""
    token = tmp_path / "token"
    token.write_text(secret("worker"))
    monkeypatch.setenv("HISTOSPEC_TOKEN_FILE", str(token))
    server = start_server(*with_tokens(tmp_path, worker={"rights": ["read", "write"]}))

    async def run() -> None:
        async with AsyncDraftClient(server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
            sessions = await client.open([PROMPT])
            await client.step(sessions, [[1]])
            token.unlink()
            server.restart()
            for _ in range(100):
                await client.step(sessions, [[1]])
                await client.flush(0.01)
            token.write_text(secret("worker"))
            await client.finish(sessions)
            while client.stats().pending_commits:
                await client.flush(1)
                await asyncio.sleep(0.01)

    asyncio.run(run())
    with DraftClient(server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        assert len(client.history(PROMPT)) == 1
        token.unlink()
        assert "no drafts from" in lines_of(client, said, len(said()) + 1)[-1]
        token.write_text(secret("worker"))
        assert "drafting again" in lines_of(client, said, len(said()) + 1)[-1]
    assert not [line for line in said() if line.startswith("ERROR")]


def test_no_step_waits_for_the_reason(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """A hanging diagnosis: steps go on. One thread runs it, and logs its line when it ends."""
    hangs, calls = threading.Event(), []

    def diagnose(*arguments: object) -> None:
        calls.append(arguments)
        hangs.wait(240)

    monkeypatch.setattr(diagnosis, "diagnose", diagnose)
    with DraftClient(f"127.0.0.1:{free_port()}", "run", breaker=QUICK, deadline=0.02) as client:
        sessions = client.open([PROMPT])
        client.step(sessions, [[1]])
        eventually(lambda: client.step(sessions, [[1]]) and calls)
        for _ in range(300):
            client.step(sessions, [[1]])
        assert [thread.name for thread in threading.enumerate()].count("histospec-diagnosis") == 1
        assert (len(calls), said()) == (1, [])
        hangs.set()
        eventually(said)
        assert "no drafts from 127.0.0.1:" in said()[0]  # nothing was found, so it is what gRPC says


def test_a_process_ends_while_the_reason_is_looked_for() -> None:
    """Without a line and without waiting: the server accepts connections and sends nothing."""
    script = """
import socket, sys, threading, time
from histospec.client import DraftClient
from histospec.client.transport import diagnosis
diagnosis.PATIENCE = 240
listener = socket.create_server(("127.0.0.1", 0))
client = DraftClient("127.0.0.1:%d" % listener.getsockname()[1], "run", deadline=0.05)
sessions = client.open([[1]])
client._core.unreachable(client._core.shards[0], __import__("grpc").StatusCode.UNAVAILABLE, "x")
assert "histospec-diagnosis" in [thread.name for thread in threading.enumerate()]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_the_reason_is_looked_for() -> None:
    """The child has neither this thread nor a client; the parent goes on and logs its line."""
    script = """
import os, socket, sys, time
from histospec.client import DraftClient, Unavailable
from histospec.client.transport import diagnosis
silent = socket.create_server(("127.0.0.1", 0))
client = DraftClient("127.0.0.1:%d" % silent.getsockname()[1], "run", deadline=0.05)
sessions = client.open([[1]])
client.step(sessions, [[1]])
client._core.unreachable(client._core.shards[0], __import__("grpc").StatusCode.UNAVAILABLE, "x")
child = os.fork()
if not child:
    try:
        client.step(sessions, [[1]])
    except Unavailable:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
while not client._core.shards[0].contact.logged:
    client.step(sessions, [[1]])
"""
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()  # Python's own handler, of which a line has no more than its text
    assert len([line for line in lines if line.startswith("HistoSpec: no server at 127.0.0.1:")]) == 1


@pytest.mark.asyncio
async def test_the_async_face_greets_the_same(shared_server: Server, said: Callable[[], list[str]]) -> None:
    away = f"127.0.0.1:{free_port()}"
    async with AsyncDraftClient(f"up={shared_server.endpoint},away={away}", "run", deadline=PATIENT) as client:
        assert [answer.shard for answer in await client.greet(60)] == [shared_server.endpoint]
        await until(lambda: bool(said()))
        assert f"no server at {away}, shard away (connection refused)" in said()[0]


def test_greet(start_server: Starter, said: Callable[[], list[str]]) -> None:
    """One shard answers, one is away: the log reports both once."""
    up, away = start_server("--shard-name", "up"), f"127.0.0.1:{free_port()}"
    with DraftClient(f"up={up.endpoint},away={away}", "run", breaker=QUICK, deadline=PATIENT) as client:
        assert [answer.shard for answer in client.greet(60)] == ["up"]
        eventually(said)
        (line,) = said()
        assert f"no server at {away}, shard away (connection refused)" in line
        sessions = client.open([[n] for n in range(20)])
        for _ in range(50):
            client.step(sessions, [[1]] * 20)
        assert client.stats().failed > 0
        assert said() == [line]
