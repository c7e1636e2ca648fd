"""Measures how soon drafts are back after a server was killed and started again under load.

Workers in separate processes step all their sessions with a pause after each step, with and without the server. The
server is killed with SIGKILL, and starts again with its store after some seconds. Meanwhile a worker may finish many
responses, which wait for the server. Each restart begins with an empty store. Prints a Markdown table.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.process import Child
from benchmarks.tables import heading, line
from examples.draft_server import running
from histospec.client import DraftClient, Response

NAMESPACE = "restarts"
PROBLEMS = 32
PROMPT = 1000  # tokens
GENERATED = 1000, 3000  # tokens of a session when it opens
HISTORY = 16_000  # tokens of the response that every session of a problem repeats
FINISHED = 2000  # tokens of a waiting response
AWAY = 6.0, 10.0  # seconds without a server
LIMIT = 30.0  # seconds; later events count as happening then


class Back(NamedTuple):
    """The events of one worker after a restart; times by time.monotonic()."""

    first: float
    """Time of the first draft."""
    every: float
    """Time when every session had had a draft."""
    stored: float
    """Time when the server had acknowledged every waiting response."""
    late: int
    """Steps that missed their deadline, from the first draft to the end."""
    skipped: int
    """Steps without a server, from the first draft to the end."""
    longest: float
    """Seconds of the longest step, from the kill to the end."""


def text(problem: int, tokens: int) -> npt.NDArray[np.int32]:
    """Returns random tokens, the same ones in each call."""
    return np.random.default_rng(problem).integers(0, 50_000, tokens, dtype=np.int32)


class Worker:
    """A client that steps all its sessions together."""

    def __init__(self, endpoint: str, number: int, sessions: int, pause: float) -> None:
        self._client = DraftClient(endpoint, NAMESPACE)
        self._pause = pause
        self._prompts = [text(problem, PROMPT) for problem in range(PROBLEMS)]
        self._texts = [text(PROBLEMS + problem, HISTORY) for problem in range(PROBLEMS)]
        self._positions = np.random.default_rng(number).integers(*GENERATED, sessions)
        problems = [n % PROBLEMS for n in range(sessions)]
        self._mine = [self._texts[problem] for problem in problems]
        begun = [whole[:position] for whole, position in zip(self._mine, self._positions, strict=True)]
        self._sessions = self._client.open([self._prompts[problem] for problem in problems], generated=begun)
        self._back: Back | None = None

    def ingest(self) -> None:
        """The history that the sessions repeat."""
        self._client.ingest_many(self._prompts, [[Response(whole)] for whole in self._texts], epoch=0)

    def steps(self, seconds: float) -> None:
        """Steps until every session has had a draft, and for this many seconds."""
        until, waiting = time.monotonic() + seconds, set(self._sessions)
        while waiting or time.monotonic() < until:
            waiting -= self._step()
        if self._client.stats().pending_commits:
            raise RuntimeError("responses wait before the server is killed")

    def finish(self, responses: int) -> None:
        """Finishes responses that wait for the server."""
        random = np.random.default_rng(0)
        for start in range(0, responses, 100):
            some = range(start, min(start + 100, responses))
            texts = [random.integers(0, 50_000, FINISHED, dtype=np.int32) for _ in some]
            opened = self._client.open([self._prompts[n % PROBLEMS] for n in some], generated=texts)
            self._client.close(opened, epochs=0)

    def until_back(self, seconds: float) -> None:
        """Steps through the outage, until every session has had a draft and every response is acknowledged."""
        until = time.monotonic() + seconds
        waiting, first, every, stored, longest = set(self._sessions), 0.0, 0.0, 0.0, 0.0
        late = skipped = 0
        while not (every and stored) and (begun := time.monotonic()) < until:
            drafted = self._step()
            now, stats = time.monotonic(), self._client.stats()
            longest = max(longest, now - begun - self._pause)
            if drafted and not first:
                first, late, skipped = now, stats.late, stats.skipped
            waiting -= drafted
            if not waiting and not every:
                every = now
            if first and not stats.pending_commits and not stored:
                stored = now
        stats = self._client.stats()
        times = (first or until, every or until, stored or until)
        self._back = Back(*times, stats.late - late, stats.skipped - skipped, longest)

    def back(self) -> Back:
        """Returns the result of `until_back`."""
        assert self._back is not None
        return self._back

    def end(self) -> None:
        """Ends the client."""
        self._client.shutdown()

    def _step(self) -> set[int]:
        """Makes one step and the pause of a forward pass. Returns how many sessions had a draft."""
        tokens = [whole[p : p + 1] for whole, p in zip(self._mine, self._positions, strict=True)]
        self._positions += 1
        drafts = self._client.step(self._sessions, tokens)
        time.sleep(self._pause)
        return {session for session, draft in zip(self._sessions, drafts, strict=True) if len(draft)}


class Restart(NamedTuple):
    """The times of a restart: seconds from /readyz on, of the slowest worker."""

    first: float
    every: float
    stored: float
    late: int
    skipped: int
    longest: float


def restart(workers: int, sessions: int, pause: float, backlog: int, away: float) -> Restart:
    """One of them."""
    with tempfile.TemporaryDirectory() as name:
        data, log = Path(name, "data"), Path(name, "log")
        with running(data, log) as server:
            children = [Child(Worker, server.endpoint, n, sessions, pause) for n in range(workers)]
            children[0].call(Worker.ingest)
            together(children, lambda child: child.start(Worker.steps, 2.0))
            os.kill(server.pid, signal.SIGKILL)
        if backlog:
            together(children, lambda child: child.start(Worker.finish, backlog))
        for child in children:
            child.start(Worker.until_back, LIMIT)
        time.sleep(away)
        with running(data, log, at=server):
            ready = time.monotonic()
            for child in children:
                child.wait()
            backs = [child.call(Worker.back) for child in children]
            for child in children:
                child.call(Worker.end)
                child.end()
    first, every, stored = (
        max(max(0.0, time - ready) for time in times) for times in zip(*(b[:3] for b in backs), strict=True)
    )
    return Restart(
        first,
        every,
        stored,
        late=sum(back.late for back in backs),
        skipped=sum(back.skipped for back in backs),
        longest=max(back.longest for back in backs),
    )


def together(children: Sequence[Child[Worker]], begin: Callable[[Child[Worker]], None]) -> None:
    """Calls all workers in parallel; returns when the last call has ended."""
    for child in children:
        begin(child)
    for child in children:
        child.wait()


def row(name: str, restarts: Sequence[Restart]) -> str:
    """Returns a row of the table."""

    def span(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f}, {max(values):.2f}"

    cells = [span([getattr(r, field) for r in restarts]) for field in ("first", "every", "stored")]
    soon = sum(r.every <= 2.0 for r in restarts)
    late = f"{statistics.median(r.late for r in restarts):g}, {statistics.median(r.skipped for r in restarts):g}"
    return line([name, *cells, f"{soon} of {len(restarts)}", late, f"{1e3 * max(r.longest for r in restarts):.0f}"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=10, help="of each row")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=256, help="of a worker")
    parser.add_argument("--pause", type=float, default=0.015, help="seconds after each step: the forward pass")
    parser.add_argument("--backlog", type=int, nargs="*", default=[0, 10_000], help="responses that wait, of a worker")
    options = parser.parse_args()
    seconds = [f"s from /readyz to {what}: median, worst" for what in ("the first draft", "all sessions drafting")]
    seconds.append("… to the last response stored")
    head = ["responses that wait", *seconds, "all drafting within 2 s", "steps late, skipped", "longest step, ms"]
    print(heading(head), end="", flush=True)
    for backlog in options.backlog:
        aways = np.linspace(*AWAY, options.restarts)
        done = [restart(options.workers, options.sessions, options.pause, backlog, away) for away in aways]
        print(row(f"{backlog:,}", done), end="", flush=True)


if __name__ == "__main__":
    main()
