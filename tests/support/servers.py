"""Real servers: `histospec serve` as its own process, on free ports, with a data directory of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import forks
from tests.support.children import ignored
from tests.support.network import Host
from tests.support.ports import free_port
from tests.support.waiting import SECONDS, eventually

MOST_LINES = 50_000  # of a log that are kept; errors always


def run_first(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets servers run this code before they start."""
    script = folder / "patched-server"
    script.write_text(
        f"#!{sys.executable}\nimport sys\n{code}\nfrom histospec.server import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("HISTOSPEC_TEST_SERVER", str(script))


class Server:
    """A `histospec serve` process that can be killed and started again on the same ports and data.

    It listens on loopback, or on a host of a test's network, whom it trusts. `ignoring`: signals that it is told to
    ignore when it starts, as `nohup` does with SIGHUP. `stderr`: a descriptor that it writes its log to instead.
    endpoint, http: "host:port" of gRPC and HTTP. data_dir: its store. log: its log lines as dicts, oldest first.
    """

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        host: Host | None = None,
        ignoring: Sequence[int] = (),
        stderr: int | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.flags = (*flags, "--insecure") if host else flags
        self.host = host
        self.log: list[dict[str, Any]] = []
        # Not port 0 on loopback: a connection might take the port while the server is being restarted.
        self.endpoint, self.http = (f"{host.address}:0" if host else f"127.0.0.1:{free_port()}" for _ in range(2))
        self._env = env or {}
        self._ignoring = ignoring
        self._stderr = stderr
        self._process: subprocess.Popen[str] | forks.Fork | None = None
        self._reader: threading.Thread | None = None

    def start(self, ready: bool = True) -> "Server":
        """Starts the process; waits until it listens and, unless told otherwise, is ready and has loaded its store."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")}
        # An environment with the client alone names the server of another one.
        elsewhere = os.environ.get("HISTOSPEC_TEST_SERVER")
        environment |= self._env
        words = ["serve", "--log-format", "json", "--listen", self.endpoint, "--http", self.http]
        words += ["--data-dir", str(self.data_dir), *self.flags]
        # Not in the repository root: there, the folder `server` would be importable as a second package.
        folder = self.data_dir.parent
        self._process = None
        if self.host is None and elsewhere is None and self._stderr is None:
            self._process = forks.new(words, folder, environment, self._ignoring)
        if self._process is None:
            command = list(self.host.prefix) if self.host else []
            command += [elsewhere] if elsewhere else [sys.executable, "-m", "histospec.server"]
            with ignored(self._ignoring):
                stderr = subprocess.PIPE if self._stderr is None else self._stderr
                self._process = subprocess.Popen(
                    [*command, *words], stderr=stderr, text=True, cwd=folder, env=environment
                )
        if self._stderr is None:
            before = len(self.log)
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
            listening = self._wait(lambda: next((e for e in self.log[before:] if e.get("event") == "listening"), None))
            self.endpoint, self.http = str(listening["grpc"]), str(listening["http"])
        if ready:
            self._wait(lambda: self.get("/readyz")[0] == 200)
            self.until_loaded()
        return self

    def logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Returns the log lines whose event has that text, oldest first, once there are `count` (a thread reads)."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.log if event in str(line.get("event"))]

        eventually(lambda: len(found()) >= count, f"{event!r} is not {count} times in the log: {self.log}")
        return found()

    def until_loaded(self) -> None:
        """Waits until nothing more is loaded in the background."""
        self._wait(lambda: self.metrics().get("histospec_loading") == 0)

    @property
    def forked(self) -> bool:
        """Whether it is a fork of a process that has imported the command."""
        return isinstance(self._process, forks.Fork)

    @property
    def running(self) -> bool:
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

    def drain(self) -> None:
        """Asks it to drain and stop, and waits until it has."""
        self.terminate()
        assert self.wait() == 0

    def wait(self) -> int:
        """Waits for the end of the process; its exit code."""
        assert self._process is not None
        code = self._process.wait(SECONDS)
        if self._reader is not None:
            self._reader.join(SECONDS)
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
        """Returns status and body of an HTTP GET; status 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, with labels in sorted order: `histospec_drafts_total{namespace="a",…}`.

        Without `run`, the other name of a namespace.
        """
        status, text = self.get("/metrics")
        assert status == 200, text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                assert sample.labels.get("run") == sample.labels.get("namespace")
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()) if key != "run")
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its samples with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name and all(label in key for label in wanted)
        )

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _read(self, process: "subprocess.Popen[str] | forks.Fork") -> None:
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
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}: {self.log}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not come up: {self.log}")
            time.sleep(0.02)
        return value if isinstance(value, dict) else {}


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
        stderr: int | None = None,
        ready: bool = True,
    ) -> Server:
        directory = self._directory / (name or f"server-{len(self._servers)}")
        server = Server(directory, *flags, env=env, host=host, ignoring=ignoring, stderr=stderr)
        self._servers.append(server)
        return server.start(ready)

    def stop(self) -> None:
        for server in self._servers:
            server.stop()


def secret(name: str) -> str:
    """Of the token of this name."""
    return f"{name}-secret-0123456789"


def with_tokens(folder: Path, **tokens: dict[str, list[str]]) -> tuple[str, str]:
    """The option of a server that knows these tokens, by name: their namespaces and rights. Writes their file."""
    lines: list[str] = []
    for name, rights in tokens.items():
        lines += ["[[token]]", f'name = "{name}"', f'secret = "{secret(name)}"']
        lines += [f"{key} = {json.dumps(value)}" for key, value in rights.items()]
    (folder / "tokens.toml").write_text("\n".join(lines))
    return "--tokens", str(folder / "tokens.toml")


class Peak:
    """How far the memory of a process grows from now on."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # the peak starts again from here
        self._before = self._bytes("VmRSS")

    def grown(self) -> int:
        """Its peak above the start, in bytes."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
