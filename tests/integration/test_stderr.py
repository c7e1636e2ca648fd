"""A log that cannot be written: the service continues normally, answers correctly, and ends."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

PIPE, PAGE = 64 << 10, 4 << 10  # bytes that a pipe holds, and that it may leave free
LONG = "x" * 100

Piped = Callable[..., tuple[Server, TextIO]]


@pytest.fixture
def piped(start_server: Starter) -> Piped:
    """piped(*flags) -> a server whose stderr is a pipe, and the other end of the pipe."""

    def start(*flags: str) -> tuple[Server, TextIO]:
        read, write = os.pipe()
        server = start_server(*flags, stderr=write)
        os.close(write)
        return server, os.fdopen(read)

    return start


def works(wire: Wire, first: int, count: int) -> None:
    """Ingests and commits are acknowledged, and refusals keep their reasons."""
    for i in range(first, first + count):
        assert wire.ingest([i], [[1, 2]], namespace=LONG).responses == 1
        stream = wire.stream()
        answer = stream.ask(opens=[wire.open(1, [i], LONG)], step=wire.step([1], [[5]]), closes=[wire.commit(1, 1)])
        assert not answer.refusals
        stream.end()
        assert wire.history([i], LONG) == [[1, 2], [5]]


def dropped(server: Server) -> bool:
    return server.metrics()["histospec_log_lines_dropped_total"] >= 20


def test_a_full_device_costs_lines_alone(start_server: Starter, connect: Connector) -> None:
    with open("/dev/full", "wb") as full:
        server = start_server(stderr=full.fileno())
    works(connect(server.endpoint), 0, 20)
    eventually(lambda: dropped(server), "what was dropped is not counted")
    server.drain()


def test_a_reader_that_left_costs_lines_alone(piped: Piped, connect: Connector) -> None:
    server, log = piped()
    log.close()
    works(connect(server.endpoint), 0, 20)
    eventually(lambda: dropped(server), "what was dropped is not counted")
    server.drain()


def test_a_server_without_stderr_serves(
    start_server: Starter, connect: Connector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "without-stderr"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m histospec.server "$@" 2>&-\n')
    program.chmod(0o700)
    monkeypatch.setenv("HISTOSPEC_TEST_SERVER", str(program))
    server = start_server(stderr=subprocess.DEVNULL)
    works(connect(server.endpoint), 0, 20)
    server.drain()


def fill(wire: Wire, log: TextIO) -> None:
    first = 0
    while int.from_bytes(fcntl.ioctl(log, termios.FIONREAD, bytes(4)), sys.byteorder) < PIPE - PAGE:
        works(wire, first, 20)
        first += 20
    works(wire, first, 20)


def test_a_pipe_that_is_not_read_stops_nothing(piped: Piped, connect: Connector) -> None:
    """Neither requests nor the end of the process wait for the log."""
    server, log = piped()
    fill(connect(server.endpoint), log)
    assert server.get("/livez") == (200, "ok\n")
    server.drain()
    log.close()


def test_a_pipe_that_is_read_again_carries_whole_lines(piped: Piped, connect: Connector) -> None:
    server, log = piped()
    fill(connect(server.endpoint), log)
    server.terminate()
    with log:
        entries = [json.loads(line) for line in log]
    assert {"listening", "ingested", "draft stream ended", "stopped"} <= {entry["event"] for entry in entries}
    assert server.wait() == 0


def test_what_c_code_and_libraries_say_is_json(piped: Piped) -> None:
    """gRPC's core logs lines of its own about a client that does not speak HTTP/2."""
    server, log = piped()
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        while stranger.recv(1 << 16):
            pass
    server.drain()
    with log:
        for line in log:
            json.loads(line)


def test_names_cannot_forge_the_pretty_log(piped: Piped, connect: Connector) -> None:
    server, log = piped("--log-format", "pretty")
    wire = connect(server.endpoint)
    names = ["\x1b[31mRED", "\x1b]0;title\x07", "a\u202eb", "c\x9bd", "e\x7ff", "g\n2026-11-22 [error    ] forged"]
    for name in names:
        wire.ingest([1], [[1, 2]], namespace=name)
    server.drain()
    with log:
        said = log.read()
    assert all(line.isprintable() for line in said.split("\n"))
    assert not [line for line in said.split("\n") if line.startswith("2026-11-22 [error")]
    assert all(repr(name)[1:-1] in said for name in names)
