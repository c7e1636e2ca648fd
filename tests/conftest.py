"""Real servers for tests: `histospec serve` as its own process, on free ports, with a data directory of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 60
STOP_SECONDS = 60


class Server:
    """A `histospec serve` process that can be killed and started again on the same ports and data.

    endpoint, http: "host:port" of gRPC and HTTP. data_dir: its store. log: its log lines as dicts, oldest first.
    """

    def __init__(self, data_dir: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.flags = flags
        self.log: list[dict[str, object]] = []
        self.endpoint = self.http = "127.0.0.1:0"
        self._env = env or {}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self, ready: bool = True) -> "Server":
        """Starts the process; waits until it listens and, unless told otherwise, until /readyz says yes."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")}
        command = [sys.executable, "-m", "histospec.server", "serve", "--log-format", "json"]
        command += ["--listen", self.endpoint, "--http", self.http, "--data-dir", str(self.data_dir), *self.flags]
        # Not in the repository root: there, the folder `server` would be importable as a second package.
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
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends it as a crash would: SIGKILL."""
        self._signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """Asks it to drain and stop: SIGTERM. Does not wait."""
        self._signal(signal.SIGTERM)

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
        if self._process is not None and self._process.poll() is None:
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

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"event": line.rstrip(), "level": "text"}
            self.log.append(entry if isinstance(entry, dict) else {"event": line.rstrip()})

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


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A factory: `start_server(*flags, name="a", env=None, ready=True)` starts one more server."""
    servers: list[Server] = []

    def start(*flags: str, name: str = "", env: dict[str, str] | None = None, ready: bool = True) -> Server:
        directory = tmp_path / (name or f"server-{len(servers)}")
        server = Server(directory, *flags, env=env)
        servers.append(server)
        return server.start(ready)

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    """One running server with default options."""
    return start_server()
