"""Real servers for tests: `histospec serve` as its own process, on free ports, with a data directory of its own.

`server` and `start_server` give the process, `wire` and `connect` the generated gRPC stubs on it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from children import ignored
from network import Host
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from redis_processes import RedisCluster, RedisProcess, require_redis

from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc

START_SECONDS = 60
STOP_SECONDS = 60
MOST_LINES = 50_000  # of a log that are kept; errors always


class Server:
    """A `histospec serve` process that can be killed and started again on the same ports and data.

    It listens on loopback, or on a host of a test's network, whom it trusts. `ignoring`: signals that it is told to
    ignore when it starts, as `nohup` does with SIGHUP.
    endpoint, http: "host:port" of gRPC and HTTP. data_dir: its store. log: its log lines as dicts, oldest first.
    """

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        host: Host | None = None,
        ignoring: Sequence[int] = (),
    ) -> None:
        self.data_dir = data_dir
        self.flags = (*flags, "--insecure") if host else flags
        self.host = host
        self.log: list[dict[str, object]] = []
        # Not port 0 on loopback: a connection might take the port while the server is being restarted.
        self.endpoint, self.http = (f"{host.address}:0" if host else f"127.0.0.1:{free_port()}" for _ in range(2))
        self._env = env or {}
        self._ignoring = ignoring
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self, ready: bool = True) -> "Server":
        """Starts the process; waits until it listens and, unless told otherwise, until /readyz says yes."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")}
        # An environment with the client alone names the server of another one.
        elsewhere = os.environ.get("HISTOSPEC_TEST_SERVER")
        command = list(self.host.prefix) if self.host else []
        command += [elsewhere] if elsewhere else [sys.executable, "-m", "histospec.server"]
        command += ["serve", "--log-format", "json"]
        command += ["--listen", self.endpoint, "--http", self.http, "--data-dir", str(self.data_dir), *self.flags]
        # Not in the repository root: there, the folder `server` would be importable as a second package.
        with ignored(self._ignoring):
            self._process = subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, cwd=self.data_dir.parent, env=environment | self._env
            )
        before = len(self.log)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        listening = self._wait(lambda: next((e for e in self.log[before:] if e.get("event") == "listening"), None))
        self.endpoint, self.http = str(listening["grpc"]), str(listening["http"])
        if ready:
            self._wait(lambda: self.get("/readyz")[0] == 200)
        return self

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends it as a crash would: SIGKILL."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """Asks it to drain and stop: SIGTERM. Does not wait."""
        self.signal(signal.SIGTERM)

    def wait(self) -> int:
        """Waits for the end of the process; its exit code."""
        assert self._process is not None
        assert self._reader is not None
        code = self._process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        return code

    def restart(self, ready: bool = True) -> None:
        """Starts it again where it was, after stopping it if it still runs."""
        self.stop()
        self.start(ready)

    def stop(self) -> None:
        """Makes sure that it does not run."""
        if self.running:
            self.kill()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP GET; status 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, with labels in sorted order: `histospec_drafts_total{namespace="a",…}`."""
        status, text = self.get("/metrics")
        assert status == 200, text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"event": line.rstrip(), "level": "text"}
            entry = entry if isinstance(entry, dict) else {"event": line.rstrip()}
            if len(self.log) < MOST_LINES or entry.get("level") == "error":
                self.log.append(entry)

    def _wait(self, condition: Callable[[], object]) -> dict[str, object]:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not (value := condition()):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}: {self.log}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not come up: {self.log}")
            time.sleep(0.02)
        return value if isinstance(value, dict) else {}


def i32(values: Iterable[int] = ()) -> bytes:
    """Little-endian int32, as tokens, lengths and positions travel."""
    return np.array(list(values), "<i4").tobytes()


def u64(values: Iterable[int] = ()) -> bytes:
    """Little-endian uint64, as session ids travel."""
    return np.array(list(values), "<u8").tobytes()


class Stream:
    """A Draft stream of raw messages. Sending and receiving are apart, so that a test may do either first."""

    def __init__(self, stub: pb_grpc.DraftServiceStub) -> None:
        self._requests: queue.SimpleQueue[pb.DraftRequest | None] = queue.SimpleQueue()
        self._sequence = 0
        self.call = stub.Draft(iter(self._requests.get, None), timeout=120)

    def send(self, **fields: Any) -> int:
        """Sends a DraftRequest of these fields; its sequence."""
        self._sequence += 1
        self._requests.put(pb.DraftRequest(sequence=self._sequence, **fields))
        return self._sequence

    def receive(self) -> pb.DraftResponse:
        """The next answer, whichever message it answers."""
        return next(self.call)

    def ask(self, **fields: Any) -> pb.DraftResponse:
        """Sends a request that will be answered, and its answer."""
        sequence = self.send(**fields)
        response = self.receive()
        assert response.sequence == sequence
        return response

    def end(self) -> list[pb.DraftResponse]:
        """Says that nothing more will be sent; what still arrives."""
        self._requests.put(None)
        return list(self.call)

    def cancel(self) -> None:
        """Drops it without a word."""
        self.call.cancel()
        self._requests.put(None)

    def error(self) -> grpc.RpcError:
        """The error that ends the stream."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.call)
        return caught.value


class Wire:
    """The draft service as the generated stubs show it, and its arrays as bytes."""

    i32 = staticmethod(i32)
    u64 = staticmethod(u64)

    def __init__(self, endpoint: str) -> None:
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        self.channel = grpc.insecure_channel(endpoint, options=quick)
        self.stub = pb_grpc.DraftServiceStub(self.channel)
        self._streams: list[Stream] = []

    def stream(self) -> Stream:
        """A new Draft stream."""
        self._streams.append(Stream(self.stub))
        return self._streams[-1]

    def close(self) -> None:
        """Cancels what is open."""
        for stream in self._streams:
            stream.cancel()
        self.channel.close()

    @staticmethod
    def open(session: int, prompt: Iterable[int] = (1, 2, 3), namespace: str = "run", **fields: Any) -> pb.OpenSession:
        """An OpenSession."""
        return pb.OpenSession(session=session, namespace=namespace, prompt=i32(prompt), **fields)

    @staticmethod
    def step(
        sessions: Sequence[int],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int] | None = None,
        max_tokens: int = 16,
        verify_cost: float = 0.05,
    ) -> pb.Step:
        """A Step; positions default to zeros."""
        return pb.Step(
            sessions=u64(sessions),
            positions=i32(positions if positions is not None else [0] * len(sessions)),
            lengths=i32(map(len, tokens)),
            tokens=i32(token for some in tokens for token in some),
            max_tokens=max_tokens,
            verify_cost=verify_cost,
        )

    @staticmethod
    def commit(session: int, generated: int, **fields: Any) -> pb.CloseSession:
        """A CloseSession that commits."""
        return pb.CloseSession(session=session, commit=True, generated=generated, **fields)

    @staticmethod
    def drafts(response: pb.DraftResponse) -> list[list[int]]:
        """The drafted tokens, one list a session."""
        tokens, lengths = np.frombuffer(response.tokens, "<i4"), np.frombuffer(response.lengths, "<i4")
        assert len(response.tokens) == len(response.probs)
        return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []

    @staticmethod
    def unknown(response: pb.DraftResponse) -> list[int]:
        """The sessions that the server does not hold."""
        return np.frombuffer(response.unknown, "<u8").tolist()

    def ingest(
        self, prompt: Iterable[int], responses: Sequence[Iterable[int]], namespace: str = "run", **fields: Any
    ) -> pb.IngestResponse:
        """Ingests responses that are tokens alone."""
        return self.stub.Ingest(
            pb.IngestRequest(
                namespace=namespace,
                prompt=i32(prompt),
                responses=[pb.Response(tokens=i32(r)) for r in responses],
                **fields,
            )
        )

    def history(
        self, prompt: Iterable[int], namespace: str = "run", *, wait: bool = False, **fields: Any
    ) -> list[list[int]]:
        """Tokens of the stored responses, oldest first. `wait`: until the server is there again."""
        request = pb.HistoryRequest(namespace=namespace, prompt=i32(prompt), **fields)
        answer = self.stub.History(request, timeout=60, wait_for_ready=wait)
        return [np.frombuffer(r.tokens, "<i4").tolist() for r in answer.responses]


class Starter:
    """Starts servers in one directory, each with its own data: `start(*flags, name="a", env=…, host=…, ready=True)`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: list[Server] = []

    def __call__(
        self,
        *flags: str,
        name: str = "",
        env: dict[str, str] | None = None,
        host: Host | None = None,
        ignoring: Sequence[int] = (),
        ready: bool = True,
    ) -> Server:
        directory = self._directory / (name or f"server-{len(self._servers)}")
        server = Server(directory, *flags, env=env, host=host, ignoring=ignoring)
        self._servers.append(server)
        return server.start(ready)

    def stop(self) -> None:
        """Stops all of them."""
        for server in self._servers:
            server.stop()


class Connector:
    """Opens raw connections: `connect(server.endpoint)`."""

    def __init__(self) -> None:
        self._wires: list[Wire] = []

    def __call__(self, endpoint: str) -> Wire:
        self._wires.append(Wire(endpoint))
        return self._wires[-1]

    def close(self) -> None:
        """Closes all of them."""
        for wire in self._wires:
            wire.close()


@pytest.fixture(scope="session")
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    require_redis()
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def _redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    require_redis()
    cluster = RedisCluster(tmp_path_factory.mktemp("redis-cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture
def redis_server(_redis_server: RedisProcess) -> RedisProcess:
    """A Redis server without data, for tests that leave it running."""
    _redis_server.client.flushall()
    return _redis_server


@pytest.fixture
def redis_cluster(_redis_cluster: RedisCluster) -> RedisCluster:
    """A Redis Cluster of three masters without data, for tests that leave it running."""
    for node in _redis_cluster.nodes:
        node.client.flushall()
    return _redis_cluster


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Starter]:
    """A factory of servers that end with the test."""
    start = Starter(tmp_path)
    yield start
    start.stop()


@pytest.fixture
def server(start_server: Starter) -> Server:
    """One running server with default options, of this test alone."""
    return start_server()


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """A factory of servers that end with the module."""
    start = Starter(tmp_path_factory.mktemp("shared"))
    yield start
    start.stop()


@pytest.fixture(scope="module")
def shared_server(start_shared: Starter) -> Server:
    """One running server with default options for all tests of a module."""
    return start_shared()


@pytest.fixture
def connect() -> Iterator[Connector]:
    """A factory of raw connections that end with the test."""
    connect = Connector()
    yield connect
    connect.close()


@pytest.fixture(scope="module")
def connect_shared() -> Iterator[Connector]:
    """A factory of raw connections that end with the module."""
    connect = Connector()
    yield connect
    connect.close()


@pytest.fixture
def wire(server: Server, connect: Connector) -> Wire:
    """A raw connection to `server`."""
    return connect(server.endpoint)
