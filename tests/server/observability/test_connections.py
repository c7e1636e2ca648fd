"""The HTTP port stays usable: peers that hold connections block neither other peers nor gRPC clients."""

import asyncio
import contextlib
import os
import resource
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from prometheus_client import Metric
from prometheus_client.registry import Collector

from histospec.native import Engine
from histospec.server.history.counts import Counts
from histospec.server.observability.connections import (
    ANSWERING,
    CLOSED,
    CROWDED,
    IDLE,
    LATE,
    MAX_REQUEST,
    RECEIVING,
    _peer,
)
from histospec.server.observability.metrics import Metrics
from histospec.server.observability.web import Web, application, most_connections
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually, until
from tests.support.wires import Connector

DESCRIPTORS = 64
MOST = most_connections(DESCRIPTORS)
EACH = MOST // 4
PATIENT = {RECEIVING: 60.0, ANSWERING: 60.0, IDLE: 60.0}
HALF = b"GET /livez HTTP/1.1\r\nHost: a\r\nX-slow: "
WHOLE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


class Port:
    """An HTTP port in this process, and connections to it."""

    def __init__(self, port: int, metrics: Metrics) -> None:
        self._port = port
        self.metrics = metrics
        self._writers: list[Writer] = []

    async def connect(self, peer: str, data: bytes) -> Reader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(peer, 0))
        self._writers.append(writer)
        writer.write(data)
        return reader

    async def livez(self, peer: str) -> bytes:
        """Returns the status line that a peer gets."""
        return await (await self.connect(peer, WHOLE)).readline()

    def closed(self) -> dict[str, float]:
        return {why: self.metrics.http_closed.labels(why)._value.get() for why in CLOSED}

    @property
    def open(self) -> float:
        [family] = self.metrics.http_connections.collect()
        return family.samples[0].value

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def listening(seconds: Mapping[str, float] = PATIENT) -> AsyncIterator[Port]:
    metrics = Metrics(Engine(1 << 24), Counts())

    async def overview() -> dict[str, object]:
        return {}

    with ThreadPoolExecutor(1) as aside:
        web = Web(application(metrics, dict, {}, overview, aside), metrics, DESCRIPTORS, seconds)
        port = Port(await web.start("127.0.0.1", 0), metrics)
        try:
            yield port
        finally:
            port.close()
            await web.stop()


async def ended(reader: Reader) -> None:
    """Returns when the server has closed a connection."""
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 60)


@pytest.mark.parametrize("data", [b"", b"G", HALF, b"\r\n"], ids=["nothing", "a byte", "headers", "a line"])
@pytest.mark.asyncio
async def test_half_a_request_is_closed(data: bytes) -> None:
    async with listening(PATIENT | {RECEIVING: 0.1}) as port:
        await ended(await port.connect("127.0.0.1", data))
        assert port.closed()[LATE] == 1
        await until(lambda: port.open == 0)


@pytest.mark.asyncio
async def test_bytes_that_trickle_in_win_no_time() -> None:
    async with listening(PATIENT | {RECEIVING: 0.2}) as port:
        reader = await port.connect("127.0.0.1", HALF)
        over = asyncio.ensure_future(ended(reader))
        while not over.done():
            port._writers[0].write(b"x")
            await asyncio.sleep(0.01)
        assert port.closed()[LATE] == 1


@pytest.mark.asyncio
async def test_a_connection_that_idles_is_closed() -> None:
    async with listening(PATIENT | {IDLE: 0.1}) as port:
        reader = await port.connect("127.0.0.1", WHOLE)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await ended(reader)
        assert port.closed()[LATE] == 1


@pytest.mark.asyncio
async def test_the_second_request_of_a_connection_is_awaited_no_longer_than_the_first() -> None:
    async with listening(PATIENT | {RECEIVING: 0.1}) as port:
        reader = await port.connect("127.0.0.1", WHOLE)
        assert await reader.readuntil(b"ok\n")
        port._writers[0].write(HALF)
        await ended(reader)
        assert port.closed()[LATE] == 1


@pytest.mark.asyncio
async def test_a_body_that_never_comes_holds_nothing() -> None:
    async with listening() as port:
        reader = await port.connect("127.0.0.1", WHOLE[:-2] + b"Content-Length: 1000000\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await ended(reader)
        reader = await port.connect("127.0.0.1", WHOLE[:-2] + b"Content-Length: 1000000\r\n\r\n" + bytes(MAX_REQUEST))
        await ended(reader)
        await until(lambda: port.open == 0)


@pytest.mark.asyncio
async def test_a_peer_holds_its_share_and_new_connections_replace_its_oldest() -> None:
    async with listening() as port:
        held = [await port.connect("127.0.0.1", HALF) for _ in range(EACH)]
        await until(lambda: port.open == EACH)
        assert await port.livez("127.0.0.2") == b"HTTP/1.1 200 OK\r\n"
        assert port.closed()[CROWDED] == 0
        assert await port.livez("127.0.0.1") == b"HTTP/1.1 200 OK\r\n"
        await ended(held[0])
        assert port.closed()[CROWDED] == 1
        assert not any(reader.at_eof() for reader in held[1:])


@pytest.mark.asyncio
async def test_the_peer_with_most_connections_makes_room() -> None:
    async with listening() as port:
        held = [await port.connect("127.0.0.1", HALF) for _ in range(EACH)]
        await until(lambda: port.open == EACH)
        others = [await port.connect(f"127.0.0.{2 + i // 3}", HALF) for i in range(MOST - EACH)]
        await until(lambda: port.open == MOST)
        assert await port.livez("127.0.0.99") == b"HTTP/1.1 200 OK\r\n"
        await ended(held[0])
        assert port.closed()[CROWDED] == 1
        assert not any(reader.at_eof() for reader in (*held[1:], *others))


class Looks(Collector):
    """Records the thread of each computation of /metrics, and takes some time."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.go = threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.threads.append(threading.current_thread())
        assert self.go.wait(60)
        yield from ()


@pytest.mark.asyncio
async def test_scrapers_share_a_computation_that_is_not_on_the_loop() -> None:
    """
    1. One caller asks; during the computation, nine more ask, and /livez is answered.
    2. There were two computations, none of them in the thread of the event loop.
    """
    scrape = WHOLE.replace(b"livez", b"metrics")
    async with listening() as port:
        looks = Looks()
        looks.go.set()
        port.metrics.registry.register(looks)  # which asks it for its names
        looks.go.clear()
        looks.threads.clear()
        first = [await port.connect("127.0.0.1", scrape)]
        await until(lambda: looks.threads)
        more = [await port.connect(f"127.0.0.{2 + i // 3}", scrape) for i in range(9)]
        assert await port.livez("127.0.0.99") == b"HTTP/1.1 200 OK\r\n"
        assert len(looks.threads) == 1
        looks.go.set()
        for reader in (*first, *more):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert len(looks.threads) == 2
        assert threading.current_thread() not in looks.threads


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_peer_is_an_address_or_a_network_of_ipv6(address: str, peer: str) -> None:
    class Transport(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return (address, 1234) if name == "peername" else default

    assert _peer(Transport()) == peer


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00garbage\r\n\r\n", b"GET /livez HTTP/9.9\r\n\r\n", b"\x00" * 9000]
)
def test_what_is_no_http_is_refused_and_fills_no_log(server: Server, data: bytes) -> None:
    """The log is JSON: a line that is not JSON has no `event`."""
    host, _, port = server.http.rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=60) as one:
            one.sendall(data)
            with contextlib.suppress(ConnectionError):
                assert one.recv(1 << 16).startswith(b"HTTP/1.0 400") or data.startswith(b"GET")
    assert server.get("/livez") == (200, "ok\n")
    server.terminate()
    assert server.wait() == 0
    assert {line.get("event") for line in server.log} == {"listening", "loaded", "draining", "stopped"}


@pytest.fixture
def limited(start_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Returns a server that may open 1,024 files and sockets, a common limit of shells."""
    script = tmp_path / "limited"
    script.write_text(f'#!/bin/sh\nulimit -n 1024\nexec {sys.executable} -m histospec.server "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("HISTOSPEC_TEST_SERVER", str(script))
    return start_server()


@pytest.fixture
def many_sockets() -> Iterator[list[socket.socket]]:
    """Sockets to hold, closed at the end; this process may open as many as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held: list[socket.socket] = []
    yield held
    for one in held:
        one.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hold(sockets: list[socket.socket], address: str, number: int, data: bytes) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(number):
        one = socket.create_connection((host, int(port)), timeout=10)
        sockets.append(one)
        with contextlib.suppress(ConnectionError):
            one.sendall(data)


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def test_half_sent_requests_take_no_descriptors_from_grpc(
    limited: Server, connect: Connector, many_sockets: list[socket.socket]
) -> None:
    """
    1. A worker drafts; peers hold 1,500 incomplete HTTP requests, more than the server may open.
    2. Another client connects and ingests, the worker gets drafts, probes and Prometheus get answers.
    """
    stream = connect(limited.endpoint).stream()
    wire = connect(limited.endpoint)
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    hold(many_sockets, limited.http, 1500, HALF)
    assert connect(limited.endpoint).ingest([1], [[2, 3]]).responses == 1
    stream.ask(step=wire.step([1], [[6]], [1]))
    assert limited.get("/livez") == (200, "ok\n")
    samples = limited.metrics()
    assert samples['histospec_http_closed_total{reason="crowded"}'] > 1000
    assert samples["process_open_fds"] < 256
    assert samples["process_max_fds"] == 1024


def test_connections_to_grpc_take_no_descriptors_from_probes(
    limited: Server, connect: Connector, many_sockets: list[socket.socket]
) -> None:
    """Silent connections: probes get answers, a stream continues, and later there is room again."""
    wire = connect(limited.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    quiet = descriptors(limited)
    hold(many_sockets, limited.endpoint, 1500, b"")
    assert limited.get("/livez") == (200, "ok\n")
    assert wire.ingest([1], [[2, 3]]).responses == 1
    stream.ask(step=wire.step([1], [[6]], [1]))
    eventually(lambda: descriptors(limited) <= quiet + 1, "the silent connections are still there")
    assert connect(limited.endpoint).ingest([1], [[2, 4]]).responses == 1
    stream.ask(step=wire.step([1], [[7]], [2]))


def test_the_limit_of_descriptors_is_raised_to_what_is_allowed(start_server: Starter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        server = start_server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    [line] = [line for line in server.log if line["event"] == "listening"]
    assert line["descriptors"] == hard
