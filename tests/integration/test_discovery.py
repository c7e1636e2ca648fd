"""Clients find the shards: real servers on addresses behind one name, as with a headless Service."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from histospec.client import AsyncDraftClient, Breaker, DraftClient, Response, Timeouts, Tls, Unavailable
from histospec.client.config import configure
from histospec.client.core.core import Core
from histospec.client.errors import ConfigurationError
from histospec.client.transport.discovery import Discovery
from tests.support import certificates
from tests.support.clients import flushed
from tests.support.ports import free_port
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

TEXT = list(range(100, 140))
TIMEOUTS = Timeouts(step=2.0, discovery=0.2, leave=1.0, shutdown=20.0)
QUICK = Breaker(cooldown=0.05, cooldown_max=0.2)
PROMPTS = [[3, p] for p in range(40)]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name; other names are resolved normally."""
    names: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in names:
            return resolve(host, port, *args, **kwargs)
        if not names[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [answer for address in names[host] for answer in resolve(address, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


@pytest.fixture
def start_shard(start_server: Starter, redis_server: RedisProcess, port: int) -> Callable[..., Server]:
    """start_shard(2, *flags): shard-2 on 127.0.0.2, with data in the shared Redis."""

    def start(number: int, *flags: str) -> Server:
        name = f"shard-{number}"
        where = ["--listen", f"127.0.0.{number}:{port}"]
        return start_server("--store", redis_server.url, "--shard-name", name, *where, *flags)

    return start


def connect(endpoint: str, timeouts: Timeouts = TIMEOUTS) -> DraftClient:
    return DraftClient(endpoint, namespace="run", timeouts=timeouts, breaker=QUICK)


def members(client: DraftClient) -> list[str]:
    return sorted(shard.name for shard in client.topology())


def test_shards_behind_one_name_come_go_and_move(
    start_shard: Callable[..., Server], dns: dict[str, list[str]], port: int
) -> None:
    """
    1. Clients find two shards behind one name, each by its own name.
    2. A third one starts: it gets its problems with their history, while sessions run.
    3. One moves to another address: nothing else changes.
    4. One ends: the others take over, and what it had not acknowledged arrives.
    """
    dns["shards.test"] = ["127.0.0.2", "127.0.0.3"]
    start_shard(2)
    third = start_shard(3)
    with connect(f"discover://shards.test:{port}") as client:
        for prompt in PROMPTS:
            client.ingest(prompt, [Response([*TEXT, prompt[1]])], epoch=0)
        assert members(client) == ["shard-2", "shard-3"]
        assert {s.address for s in client.topology()} == {f"127.0.0.2:{port}", f"127.0.0.3:{port}"}
        sessions = client.open(PROMPTS)
        assert all(len(d) for d in client.step(sessions, [TEXT[:4]] * 40))

        fourth = start_shard(4)
        dns["shards.test"].append("127.0.0.4")
        eventually(lambda: members(client) == ["shard-2", "shard-3", "shard-4"], "the third shard is not found")
        eventually(lambda: all(len(d) for d in client.step(sessions, [[]] * 40)), "no drafts of the third shard")
        assert fourth.metrics()["histospec_sessions"] > 0

        third.kill()
        dns["shards.test"].remove("127.0.0.3")
        start_shard(3, "--listen", f"127.0.0.5:{port}")
        dns["shards.test"].append("127.0.0.5")
        eventually(
            lambda: f"127.0.0.5:{port}" in {s.address for s in client.topology()}, "the new address is not found"
        )
        assert members(client) == ["shard-2", "shard-3", "shard-4"]
        eventually(lambda: all(len(d) for d in client.step(sessions, [[]] * 40)), "no drafts from the new address")

        fourth.kill()
        client.step(sessions, [[TEXT[4]]] * 40)
        client.close(sessions)
        dns["shards.test"].remove("127.0.0.4")
        eventually(lambda: members(client) == ["shard-2", "shard-3"], "the shard that is gone stays")
        eventually(lambda: flushed(client, 1.0).pending_commits == 0, "responses are not acknowledged")
        assert client.stats().dropped_commits == 0
        assert all(sorted(len(r.tokens) for r in client.history(prompt)) == [5, 41] for prompt in PROMPTS)


@pytest.mark.asyncio
async def test_a_shard_that_is_gone_leaves_after_the_time_that_the_environment_says(
    start_shard: Callable[..., Server], dns: dict[str, list[str]], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_LEAVE_SECONDS", "100")
    dns["shards.test"] = ["127.0.0.2", "127.0.0.3"]
    shards = [start_shard(2), start_shard(3)]
    core = Core(configure(f"discover://shards.test:{port}", "run"), lambda: None)
    discovery = Discovery(core)
    await discovery.refresh(0.0)
    both = ["shard-2", "shard-3"]
    assert [shard.name for shard in core.shards] == both
    shards[1].kill()
    dns["shards.test"].remove("127.0.0.3")
    await discovery.refresh(100.0)
    assert [shard.name for shard in core.shards] == both
    await discovery.refresh(101.0)
    assert [shard.name for shard in core.shards] == ["shard-2"]


def test_one_shard_tells_of_all(start_shard: Callable[..., Server], port: int) -> None:
    """Shards that know each other (--peers): any one of them is enough to find all."""
    peers = ",".join(f"shard-{number}=127.0.0.{number}:{port}" for number in (2, 3))
    second, third = (start_shard(number, "--peers", peers) for number in (2, 3))
    with connect(f"discover://127.0.0.3:{port}") as client:
        client.ingest([1], [Response(TEXT)])
        assert members(client) == ["shard-2", "shard-3"]
        third.kill()  # the one that was asked; its answer still holds
        (session,) = client.open([[1]])
        eventually(lambda: members(client) == ["shard-2", "shard-3"], "a shard that is away counts as gone")
        third.start()
        eventually(lambda: len(client.step([session], [[]])[0]) > 0, "no drafts")
    second.stop()


def test_a_service_that_comes_late(start_shard: Callable[..., Server], dns: dict[str, list[str]], port: int) -> None:
    """Workers start before the service and its name exist: they run without drafts first, then with drafts."""
    dns["shards.test"] = []
    with connect(f"discover://shards.test:{port}", Timeouts(step=0.2, call=2.0, shutdown=20.0)) as client:
        (session,) = client.open([[1]])
        assert not len(client.step([session], [TEXT[:2]])[0])
        with pytest.raises(Unavailable, match="no shard was found"):
            client.ingest([1], [Response(TEXT)])
        start_shard(2)
        dns["shards.test"] = ["127.0.0.2"]
        eventually(lambda: members(client) == ["shard-2"], "the service is not found")
        client.ingest([1], [Response(TEXT)])
        eventually(lambda: len(client.step([session], [[]])[0]) > 0, "no drafts")
        client.close([session])
    with connect(f"discover://127.0.0.2:{port}") as client:
        assert [len(r.tokens) for r in client.history([1])] == [40, 2]


def test_the_async_client_finds_them_too(
    start_shard: Callable[..., Server], dns: dict[str, list[str]], port: int
) -> None:
    dns["shards.test"] = ["127.0.0.2"]
    start_shard(2)

    async def use() -> None:
        async with AsyncDraftClient(f"discover://shards.test:{port}", "run", timeouts=TIMEOUTS) as client:
            await client.ingest([1], [Response(TEXT)])
            (session,) = await client.open([[1]])
            assert len((await client.step([session], [TEXT[:2]]))[0])

    asyncio.run(use())


def test_two_shards_of_one_name_are_told_apart_by_a_warning(
    start_server: Starter,
    redis_server: RedisProcess,
    dns: dict[str, list[str]],
    port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in (2, 3):
        where = ["--listen", f"127.0.0.{number}:{port}"]
        start_server("--store", redis_server.url, "--shard-name", "same", *where)
    dns["shards.test"] = ["127.0.0.2", "127.0.0.3"]
    with connect(f"discover://shards.test:{port}") as client:
        client.ingest([1], [Response(TEXT)])
        assert members(client) == ["same"]
    assert "are both named same: give each a --shard-name of its own" in caplog.text


def test_a_shard_is_found_by_the_name_in_its_certificate(
    start_server: Starter, dns: dict[str, list[str]], port: int, tmp_path: Path
) -> None:
    """Certificates contain the name that clients use, not addresses."""
    certificates.issue(tmp_path, trustme.CA(), ["shards.test"])
    start_server("--shard-name", "a", "--listen", f"127.0.0.2:{port}", *certificates.of_server(tmp_path))
    dns["shards.test"] = ["127.0.0.2"]
    tls = Tls(ca=str(tmp_path / "ca.pem"))
    with DraftClient(f"discover://shards.test:{port}", "run", tls=tls, timeouts=TIMEOUTS) as client:
        client.ingest([1], [Response(TEXT)])
        (session,) = client.open([[1]])
        assert len(client.step([session], [TEXT[:2]])[0])


def test_where_to_ask_must_be_an_address() -> None:
    with pytest.raises(ConfigurationError, match="'nonsense' is not of the form host:port"):
        configure("discover://nonsense", "run")
