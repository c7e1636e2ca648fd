"""Measures a small worker's steps, and the times that the engine's lock is held, while other callers cause heavy load.

Every load is a process of its own with the lowest priority, repeated for some seconds. The worker steps 8 sessions
every 10 ms over a stream of its own. The server has its defaults, with one small budget for the floods. Prints a
Markdown table.
"""

import argparse
import os
import queue
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.process import Child
from benchmarks.tables import heading, line
from examples.draft_server import running
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc

Metadata = tuple[tuple[str, str | bytes], ...]

EVERY = 0.01  # seconds between two steps of the worker
MEASURED = 8.0  # seconds measured before each load, and about as many during it
DROPPED = 10_000  # problems


def i32(values: npt.ArrayLike) -> bytes:
    """Returns tokens as bytes of the wire."""
    return np.asarray(values, "<i4").tobytes()


def opening(session: int, prompt: npt.ArrayLike, namespace: str) -> pb.OpenSession:
    """Returns the message that opens a session."""
    return pb.OpenSession(session=session, namespace=namespace, prompt=i32(prompt))


def step(sessions: list[int], position: int, texts: npt.NDArray[np.int64], max_tokens: int = 16) -> pb.Step:
    """Returns a step of sessions that have the same position; texts: [B, n]."""
    lengths = [texts.shape[1]] * len(sessions)
    return pb.Step(
        sessions=np.array(sessions, "<u8").tobytes(),
        positions=i32([position] * len(sessions)),
        lengths=i32(lengths),
        tokens=i32(texts),
        max_tokens=max_tokens,
        verify_cost=0.05,
    )


class Stream:
    """One Draft stream."""

    def __init__(self, endpoint: str, metadata: Metadata = ()) -> None:
        unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._requests: queue.Queue[pb.DraftRequest | None] = queue.Queue(64)
        stub = pb_grpc.DraftServiceStub(grpc.insecure_channel(endpoint, options=unbounded))
        self._answers: Iterator[pb.DraftResponse] = iter(stub.Draft(iter(self._requests.get, None), metadata=metadata))
        self._sequence = 0

    def send(
        self,
        step: pb.Step | None = None,
        opens: Iterable[pb.OpenSession] = (),
        closes: Iterable[pb.CloseSession] = (),
    ) -> None:
        """Sends a message without waiting for the answer."""
        self._sequence += 1
        self._requests.put(pb.DraftRequest(sequence=self._sequence, step=step, opens=opens, closes=closes))

    def receive(self) -> pb.DraftResponse:
        """Returns the next answer."""
        return next(self._answers)

    def ask(self, step: pb.Step, opens: Iterable[pb.OpenSession] = ()) -> pb.DraftResponse:
        """Sends a message and returns the answer."""
        self.send(step, opens)
        return self.receive()

    def end(self) -> None:
        """Ends it."""
        self._requests.put(None)


class Load:
    """The loads of other callers; each method runs in a process of its own."""

    def __init__(self, endpoint: str, http: str) -> None:
        # They stand for other machines, so their own computing must not slow down the rest. With a low priority alone
        # they would keep a core for a time slice of some milliseconds; an idle task gives it up at once.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._endpoint, self._http = endpoint, http
        self._random = np.random.default_rng(0)

    def commits(self, messages: int, length: int) -> None:
        """Commits responses to one prompt, one per message, as fast as the server accepts them."""
        stream, text = Stream(self._endpoint), self._random.integers(0, 1000, (1, length))
        for n in range(1, messages + 1):
            close = pb.CloseSession(session=n, commit=True, generated=length, epoch=0)
            stream.send(opens=[opening(n, [7], "flood")], step=step([n], 0, text, 0), closes=[close])
            if n > 32:
                stream.receive()
        for _ in range(32):
            stream.receive()
        stream.end()

    def opens(self, sessions: int, length: int, together: int) -> None:
        """Opens a batch with long prompts, as at the start of a rollout, this many per message."""
        stream, prompts = Stream(self._endpoint), self._random.integers(0, 50_000, (sessions, length))
        ids = list(range(1, sessions + 1))
        for start in range(0, sessions, together):
            some = ids[start : start + together]
            stream.send(opens=[opening(i, prompts[i - 1], "long") for i in some])
        stream.ask(step=step(ids, 0, np.ones((sessions, 1), np.int64)))
        stream.end()

    def steps(self, sessions: int, steps: int) -> None:
        """Steps a large batch."""
        stream, ids = Stream(self._endpoint), list(range(1, sessions + 1))
        stream.ask(
            opens=[opening(i, [i % 64], "large") for i in ids], step=step(ids, 0, np.ones((sessions, 1), np.int64))
        )
        for n in range(1, steps):
            stream.ask(step=step(ids, n, self._random.integers(0, 1000, (sessions, 1))))
        stream.end()

    def burn(self, seconds: float) -> None:
        """Computes without calling the server, to measure the effect of the machine alone."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    def scrapes(self, seconds: float) -> None:
        """Scrapes /metrics without a pause."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with urllib.request.urlopen(f"http://{self._http}/metrics") as response:
                response.read()

    def problems(self, problems: int, length: int) -> None:
        """Ingests a namespace that is dropped later."""
        stub = pb_grpc.DraftServiceStub(grpc.insecure_channel(self._endpoint))
        for n in range(problems):
            response = pb.Response(tokens=i32(self._random.integers(0, 50_000, length)))
            stub.Ingest(pb.IngestRequest(namespace="drop", prompt=i32([n, 1]), responses=[response]))

    def namespaces(self, namespaces: int) -> None:
        """Makes namespaces for scrapes."""
        stub = pb_grpc.DraftServiceStub(grpc.insecure_channel(self._endpoint))
        for n in range(namespaces):
            response = pb.Response(tokens=i32([1, 2, 3]))
            stub.Ingest(pb.IngestRequest(namespace=f"run-{n}", prompt=i32([1]), responses=[response]))

    def drop(self) -> None:
        """Drops them."""
        stub = pb_grpc.DraftServiceStub(grpc.insecure_channel(self._endpoint))
        stub.DropNamespace(pb.DropNamespaceRequest(namespace="drop"))


class Case(NamedTuple):
    """A load.

    Attributes:
        name: name in the table.
        calls: the loads, each in a process, all at the same time.
        before: a call of one of them before, unmeasured.
        rounds: how often it is repeated, each time with `before`; None: until MEASURED seconds have passed.
        flags: flags of the server.

    """

    name: str
    calls: list[Callable[[Load], None]]
    before: Callable[[Load], None] | None = None
    rounds: int | None = None
    flags: tuple[str, ...] = ()


CASES = [
    Case("nothing: two other processes compute", [partial(Load.burn, seconds=MEASURED)] * 2),
    Case(
        "3,000 responses of 20,000 tokens to one prompt, `--memory 64MiB`",
        [partial(Load.commits, messages=3000, length=20_000)],
        flags=("--memory", "64MiB"),
    ),
    Case("4,096 opens of 4,000 tokens", [partial(Load.opens, sessions=4096, length=4000, together=64)]),
    Case(
        "256 opens of 64,000 tokens, in messages of 4 MiB",
        [partial(Load.opens, sessions=256, length=64_000, together=16)],
    ),
    Case(
        "256 opens of 64,000 tokens, in messages of 16 MiB",
        [partial(Load.opens, sessions=256, length=64_000, together=64)],
    ),
    Case("steps of 4,096 sessions", [partial(Load.steps, sessions=4096, steps=200)]),
    Case(
        "1,000 namespaces, 4 scrapers without a pause",
        [partial(Load.scrapes, seconds=10.0)] * 4,
        before=partial(Load.namespaces, namespaces=1000),
        rounds=1,
    ),
    Case(
        f"a drop of {DROPPED:,} problems",
        [Load.drop],
        before=partial(Load.problems, problems=DROPPED, length=2000),
        rounds=3,
    ),
]


class Worker:
    """Steps 8 sessions, and measures each answer."""

    def __init__(self, endpoint: str, metadata: Metadata = ()) -> None:
        self._stream = Stream(endpoint, metadata)
        self._ids, self._position = list(range(1, 9)), 1
        opens = [opening(i, [1, 2, 3, i], "worker") for i in self._ids]
        self._stream.ask(opens=opens, step=step(self._ids, 0, np.ones((8, 1), np.int64)))

    def step(self) -> float:
        """Returns the milliseconds of one step."""
        texts = np.full((8, 1), self._position % 97)
        started = time.perf_counter()
        self._stream.ask(step=step(self._ids, self._position, texts))
        took = 1e3 * (time.perf_counter() - started)
        self._position += 1
        time.sleep(EVERY)
        return took

    def until(self, over: Callable[[], bool]) -> list[float]:
        """Steps until `over()`."""
        taken = []
        while not over():
            taken.append(self.step())
        return taken

    def end(self) -> None:
        """Ends its stream."""
        self._stream.end()


def seconds_over(seconds: float) -> Callable[[], bool]:
    """Returns a function that tells whether this many seconds have passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def all_over(loads: list[Child[Load]]) -> Callable[[], bool]:
    """Returns a function that tells whether their calls have ended. It raises EOFError if a process died."""
    waiting = list(loads)

    def over() -> bool:
        for load in [load for load in waiting if load.ended(0)]:
            load.wait()
            waiting.remove(load)
        return not waiting

    return over


def measure(case: Case) -> str:
    """Returns a row of the table."""
    with tempfile.TemporaryDirectory() as name, running(Path(name, "data"), Path(name, "log"), *case.flags) as server:
        loads = [Child(Load, server.endpoint, server.http) for _ in case.calls]
        worker = Worker(server.endpoint)
        quiet: list[float] = []
        under_load: list[float] = []
        enough, rounds = seconds_over(2 * MEASURED), 0
        while rounds < case.rounds if case.rounds else not enough():
            rounds += 1
            if case.before:
                loads[0].call(case.before)
            if rounds == 1 or case.before:
                quiet += worker.until(seconds_over(MEASURED / (case.rounds or 1)))
            for load, call in zip(loads, case.calls, strict=True):
                load.start(call)
            under_load += worker.until(all_over(loads))
        longest = server.total("histospec_engine_lock_longest_seconds")
        worker.end()
        for load in loads:
            with suppress(OSError):
                load.end()
    (p50, p99), (b50, b99) = (np.quantile(taken, [0.5, 0.99]) for taken in (quiet, under_load))
    times = f"{p50:.1f}, {p99:.1f}", f"{b50:.1f}, {b99:.1f}"
    return line([case.name, *times, str(len(under_load)), f"{1e3 * longest:.1f}"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases, from 0")
    chosen = parser.parse_args().only
    times = "quiet: step p50, p99 ms", "under load: p50, p99 ms"
    print(heading(["load", *times, "steps", "longest lock, ms of CPU"]), end="", flush=True)
    for number, case in enumerate(CASES):
        if chosen is None or number in chosen:
            print(measure(case), end="", flush=True)


if __name__ == "__main__":
    main()
