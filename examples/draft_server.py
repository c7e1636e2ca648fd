"""`histospec serve` as a process of its own, and what its /metrics say."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Lookups:
    """How often a new session's problem had a history already (hit), or had none (miss)."""

    hit: int
    miss: int

    def __sub__(self, other: "Lookups") -> "Lookups":
        return Lookups(self.hit - other.hit, self.miss - other.miss)

    @property
    def hit_rate(self) -> float:
        """Share of hits; 0 when nothing was looked up."""
        return self.hit / (self.hit + self.miss) if self.hit + self.miss else 0.0


@dataclass(frozen=True)
class Drafts:
    """Draft tokens that were verified, and those of them that were accepted."""

    drafted: int = 0
    accepted: int = 0

    def __sub__(self, other: "Drafts") -> "Drafts":
        return Drafts(self.drafted - other.drafted, self.accepted - other.accepted)

    @property
    def acceptance(self) -> float:
        """Share of the verified tokens that was accepted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class DraftServer:
    """A running server: its addresses, host:port, and its process."""

    endpoint: str
    http: str
    pid: int

    @property
    def metrics_url(self) -> str:
        """Where Prometheus scrapes."""
        return f"http://{self.http}/metrics"

    def lookups(self, namespace: str) -> Lookups:
        """The problem lookups of a namespace so far, read from /metrics."""
        counts = {"hit": 0, "miss": 0}
        for sample in self._samples("histospec_problem_lookups_total"):
            if sample.labels["namespace"] == namespace:
                counts[sample.labels["result"]] += int(sample.value)
        return Lookups(counts["hit"], counts["miss"])

    def drafts(self, namespace: str) -> Drafts:
        """The server's drafts of a namespace so far that vLLM verified, read from /metrics."""
        drafted, accepted = (
            self.total(f"histospec_{what}_tokens_total", namespace=namespace) for what in ("draft", "accepted")
        )
        return Drafts(int(drafted), int(accepted))

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        return self.total("process_cpu_seconds_total")

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels, read from /metrics."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def _samples(self, name: str) -> Iterator[Sample]:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as reply:
            text = reply.read().decode()
        for family in text_string_to_metric_families(text):
            yield from (sample for sample in family.samples if sample.name == name)


@contextmanager
def running(data_dir: Path, log: Path, *flags: str, at: DraftServer | None = None) -> Iterator[DraftServer]:
    """Starts a server on free loopback ports, or on those of the server `at`, and stops it at the end.

    `data_dir` is where its store lives; its log goes to the file `log`; `flags` are further ones of `histospec serve`.
    Raises RuntimeError, with the end of the log, when the server does not become ready.
    """
    endpoint, http = (at.endpoint, at.http) if at else (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "histospec.server", "serve", "--listen", endpoint]
    command += ["--http", http, "--data-dir", str(data_dir), *flags]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        server = DraftServer(endpoint, http, process.pid)
        try:
            if not _ready(server, process):
                raise RuntimeError(f"the draft server did not start:\n{log.read_text()[-2000:]}")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(server: DraftServer, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://{server.http}/readyz", timeout=1):
            return True
        time.sleep(0.02)
    return False


def free_port() -> int:
    """A port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
