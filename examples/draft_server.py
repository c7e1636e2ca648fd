"""Starts `histospec serve` as a process, and reads its /metrics."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Lookups:
    """How many new sessions had a problem with history (hit), or without (miss)."""

    hit: int
    miss: int

    def __sub__(self, other: "Lookups") -> "Lookups":
        return Lookups(self.hit - other.hit, self.miss - other.miss)

    @property
    def hit_rate(self) -> float:
        """Share of hits; 0 if there were no lookups."""
        return self.hit / (self.hit + self.miss) if self.hit + self.miss else 0.0


@dataclass(frozen=True)
class Drafts:
    """How many draft tokens were verified, and how many of these were accepted."""

    drafted: int = 0
    accepted: int = 0

    def __sub__(self, other: "Drafts") -> "Drafts":
        return Drafts(self.drafted - other.drafted, self.accepted - other.accepted)

    @property
    def acceptance(self) -> float:
        """Share of the verified tokens that were accepted; 0 if none were verified."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class DraftServer:
    """A running server: its two addresses, host:port, and its process."""

    endpoint: str
    http: str
    pid: int

    @property
    def metrics_url(self) -> str:
        """The URL that Prometheus scrapes."""
        return f"http://{self.http}/metrics"

    def lookups(self, namespace: str) -> Lookups:
        """Returns the problem lookups of a namespace so far."""
        counts = {"hit": 0, "miss": 0}
        for sample in self._samples("histospec_problem_lookups_total"):
            if sample.labels["namespace"] == namespace:
                counts[sample.labels["result"]] += int(sample.value)
        return Lookups(counts["hit"], counts["miss"])

    def drafts(self, namespace: str) -> Drafts:
        """Returns the verified and accepted draft tokens of a namespace so far."""
        drafted, accepted = (
            self.total(f"histospec_{what}_tokens_total", namespace=namespace) for what in ("draft", "accepted")
        )
        return Drafts(int(drafted), int(accepted))

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the server so far."""
        return self.total("process_cpu_seconds_total")

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples with these labels."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def _samples(self, name: str) -> Iterator[Sample]:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as reply:
            text = reply.read().decode()
        for family in text_string_to_metric_families(text):
            yield from (sample for sample in family.samples if sample.name == name)


@contextmanager
def running(
    data_dir: Path,
    log: Path,
    *flags: str,
    at: DraftServer | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "histospec.server"),
) -> Iterator[DraftServer]:
    """Runs a server while the block runs.

    Args:
        data_dir: folder of its store.
        log: file of its log.
        flags: further flags of `histospec serve`.
        at: use the ports of this server; None: free ports of the loopback interface.
        environment: variables to add to the present ones.
        program: the arguments of Python before `serve`.

    Raises:
        RuntimeError: the server did not become ready; the message has the end of its log.
    """
    endpoint, http = (at.endpoint, at.http) if at else (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, *program, "serve", "--listen", endpoint]
    command += ["--http", http, "--data-dir", str(data_dir), *flags]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | dict(environment or {})
        ) as process,
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
    """Returns a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
