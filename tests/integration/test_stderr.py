"""A log that cannot be written: the service continues normally, answers correctly, and ends."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

PIPE, PAGE = 64 << 10, 4 << 10  # bytes that a pipe holds, and that it may leave free
LONG = "x" * 100


class Server:
    """`histospec serve` with a stderr from the test."""

    def __init__(self, folder: Path, stderr: int, shell: str = "", form: str = "json") -> None:
        self.endpoint, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [sys.executable, "-m", "histospec.server", "serve", "--log-format", form, "--data-dir", "data"]
        command += ["--listen", self.endpoint, "--http", self.http]
        if shell:
            command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        self.process = subprocess.Popen(command, stderr=stderr, cwd=folder)
        eventually(lambda: self.page("/readyz") == "ok\n", "the server does not start")

    def page(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return str(answer.read(), "utf-8")
        except OSError:
            return ""

    def dropped(self) -> float:
        lines = self.page("/metrics").splitlines()
        return float(next(x.split()[1] for x in lines if x.startswith("histospec_log_lines_dropped_total ")))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """serve(stderr, ...) returns a Server."""
    servers = []

    def start(*args: Any, **kwargs: Any) -> Server:
        servers.append(Server(tmp_path, *args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


def works(wire: Wire, first: int, count: int) -> None:
    """Ingests and commits are acknowledged, and refusals keep their reasons."""
    for i in range(first, first + count):
        assert wire.ingest([i], [[1, 2]], namespace=LONG).responses == 1
        stream = wire.stream()
        answer = stream.ask(opens=[wire.open(1, [i], LONG)], step=wire.step([1], [[5]]), closes=[wire.commit(1, 1)])
        assert not answer.refusals
        stream.end()
        assert wire.history([i], LONG) == [[1, 2], [5]]


def test_a_full_device_costs_lines_alone(serve: Callable[..., Server], connect: Connector) -> None:
    with open("/dev/full", "wb") as full:
        server = serve(full.fileno())
    works(connect(server.endpoint), 0, 20)
    eventually(lambda: server.dropped() >= 20, "what was dropped is not counted")
    assert server.end() == 0


def test_a_reader_that_left_costs_lines_alone(serve: Callable[..., Server], connect: Connector) -> None:
    read, write = os.pipe()
    server = serve(write)
    os.close(write)
    os.close(read)
    works(connect(server.endpoint), 0, 20)
    eventually(lambda: server.dropped() >= 20, "what was dropped is not counted")
    assert server.end() == 0


def test_a_server_without_stderr_serves(serve: Callable[..., Server], connect: Connector) -> None:
    server = serve(subprocess.DEVNULL, shell="2>&-")
    works(connect(server.endpoint), 0, 20)
    assert server.end() == 0


def fill(wire: Wire, pipe: int) -> None:
    """Makes the server log until the pipe is full."""
    first = 0
    while int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) < PIPE - PAGE:
        works(wire, first, 20)
        first += 20
    works(wire, first, 20)


def test_a_pipe_that_is_not_read_stops_nothing(serve: Callable[..., Server], connect: Connector) -> None:
    """Neither requests nor the end of the process wait for the log."""
    read, write = os.pipe()
    server = serve(write)
    os.close(write)
    fill(connect(server.endpoint), read)
    assert server.page("/livez") == "ok\n"
    assert server.end() == 0
    os.close(read)


def test_a_pipe_that_is_read_again_carries_whole_lines(serve: Callable[..., Server], connect: Connector) -> None:
    read, write = os.pipe()
    server = serve(write)
    os.close(write)
    fill(connect(server.endpoint), read)
    server.process.send_signal(signal.SIGTERM)
    with os.fdopen(read) as log:
        entries = [json.loads(line) for line in log]
    assert {"listening", "ingested", "draft stream ended", "stopped"} <= {entry["event"] for entry in entries}
    assert server.process.wait(60) == 0


def test_what_c_code_and_libraries_say_is_json(serve: Callable[..., Server], connect: Connector) -> None:
    """gRPC's core logs lines of its own about a client that does not speak HTTP/2."""
    read, write = os.pipe()
    server = serve(write)
    os.close(write)
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        while stranger.recv(1 << 16):
            pass
    assert server.end() == 0
    with os.fdopen(read) as log:
        for line in log:
            json.loads(line)


def test_names_cannot_forge_the_pretty_log(serve: Callable[..., Server], connect: Connector) -> None:
    read, write = os.pipe()
    server = serve(write, form="pretty")
    os.close(write)
    wire = connect(server.endpoint)
    names = ["\x1b[31mRED", "\x1b]0;title\x07", "a\u202eb", "c\x9bd", "e\x7ff", "g\n2026-11-22 [error    ] forged"]
    for name in names:
        wire.ingest([1], [[1, 2]], namespace=name)
    assert server.end() == 0
    with os.fdopen(read) as log:
        said = log.read()
    assert all(line.isprintable() for line in said.split("\n"))
    assert not [line for line in said.split("\n") if line.startswith("2026-11-22 [error")]
    assert all(repr(name)[1:-1] in said for name in names)
