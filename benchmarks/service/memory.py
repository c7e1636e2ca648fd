"""Measures the memory that a server needs besides its index while callers ingest beyond the budget, commit and step.

Each budget gets a server of its own. Two processes ingest 64 responses of 1,500 tokens per call, each for a new
problem, until they have ingested 1.5 times what the budget holds. Another process steps 256 sessions and commits them.
Prints a Markdown table with the peak of the server's anonymous memory, sampled every 20 ms. Libraries and files are not
included; the kernel can reclaim their memory.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.process import Child
from benchmarks.tables import heading, line
from examples.draft_server import DraftServer, running
from histospec.client import DraftClient, Response

MIB = 1 << 20
TOKENS = 1500
RESPONSES = 64
BYTES_A_TOKEN = 10.5
SESSIONS = 256


class Caller:
    """A client in a child process."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._client = DraftClient(endpoint, "run", deadline=5.0)
        self._random = np.random.default_rng(seed)
        self._phrases = self._random.integers(0, 150_000, (2000, 12), np.int32)

    def _text(self, tokens: int) -> np.ndarray:
        return self._phrases[self._random.integers(0, len(self._phrases), tokens // 12 + 1)].ravel()[:tokens]

    def ingest(self, calls: int) -> None:
        """Ingests this many problems."""
        for _ in range(calls):
            responses = [Response(self._text(TOKENS)) for _ in range(RESPONSES)]
            self._client.ingest(self._random.integers(0, 150_000, 100), responses, epoch=0)

    def roll_out(self, rounds: int) -> None:
        """Steps and commits this many batches of sessions."""
        for _ in range(rounds):
            sessions = self._client.open([self._random.integers(0, 150_000, 100) for _ in range(SESSIONS // 16)] * 16)
            for _ in range(20):
                self._client.step(sessions, [self._text(60) for _ in sessions])
            self._client.finish(sessions)
        self._client.shutdown()


def measure(budget: int, folder: Path) -> tuple[str, ...]:
    """One row."""
    with running(folder / "data", folder / "log", "--memory", str(budget)) as server:
        before = _anonymous(server)
        calls = int(1.5 * budget / (TOKENS * RESPONSES * BYTES_A_TOKEN) / 2) + 1
        callers = [Child(Caller, server.endpoint, seed) for seed in range(3)]
        for caller in callers[:2]:
            caller.start(Caller.ingest, calls)
        callers[2].start(Caller.roll_out, max(1, calls // 20))
        peak, ended = before, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.02):
                peak = max(peak, _anonymous(server))

        watching = threading.Thread(target=watch)
        watching.start()
        for caller in callers:
            caller.wait()
        time.sleep(2)
        ended.set()
        watching.join()
        extra = peak - budget
        return (
            f"{budget // MIB:,}",
            f"{before // MIB:,}",
            f"{server.total('histospec_index_bytes') / MIB:,.0f}",
            f"{peak // MIB:,}",
            f"{extra / MIB:,.0f}",
            f"{_anonymous(server) // MIB:,}",
        )


def _anonymous(server: DraftServer) -> int:
    """Bytes."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", default="256,1024,2048", help="in MiB, comma-separated (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the stores are written (default: a temporary directory)")
    arguments = parser.parse_args()
    head = ("--memory", "empty server", "index at the end", "peak", "peak beside --memory", "2 s later")
    print(heading([f"{name} (MiB)" for name in head]), end="")
    for budget in arguments.budgets.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            print(line(measure(int(budget) * MIB, Path(folder))), end="", flush=True)


if __name__ == "__main__":
    main()
