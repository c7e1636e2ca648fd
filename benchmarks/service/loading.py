"""Measures the start of a server with a large SQLite store: time to serve, loading throughput, and latency of steps.

    python -m benchmarks.service.loading make DIR                    # a store of 300,000 responses of 1,500 tokens
    python -m benchmarks.service.loading start DIR --other PATH      # compared with another version, in turns
    python -m benchmarks.service.loading index DIR                   # the limit: indexing the same responses alone

The store resembles that of an RL run: every epoch visits each problem once, in another order, and the responses of 32
problems at a time finish in random order. PATH is the folder of another version of `histospec`, as in PYTHONPATH.
Prints Markdown tables.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engine.rollouts import Texts
from benchmarks.service.pressure import Stream, Worker, opening, seconds_over, step
from benchmarks.tables import heading, line
from examples.draft_server import free_port
from histospec.native import Engine
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.v1 import draft_pb2 as pb

NAMESPACE = "run"
TOGETHER = 32  # problems whose responses are generated at the same time
KNOWN = 64  # how many tokens of a stored response a session has when it asks for the next ones
SURE = 12  # drafts of this many tokens come only from the problem's own history
EVERY = 0.005  # seconds between two steps
PATIENCE = 1800.0  # seconds
LIMIT = "8GiB"


def make(folder: Path, problems: int, epochs: int, siblings: int, length: int) -> None:
    """Writes the store."""
    texts = Texts(length)
    rng = np.random.default_rng(0)
    written = np.empty((problems, epochs * siblings, length), np.uint16)
    prompts = []
    for number in range(problems):
        prompt, responses = texts.problem(number, epochs * siblings)
        prompts.append(Problem(NAMESPACE, np.append(prompt, number).astype("<i4").tobytes()))
        written[number] = responses
    store = SQLiteStore(folder, epochs)
    for epoch in range(epochs):
        order = rng.permutation(problems)
        for first in range(0, problems, TOGETHER):
            some = order[first : first + TOGETHER]
            finished = [(int(p), epoch * siblings + n) for p in some for n in range(siblings)]
            rng.shuffle(finished)
            for number, response in finished:
                tokens = written[number, response].astype("<i4").tobytes()
                done = store.append(ResponseBatch(prompts[number], [Record(tokens, epoch, 0.5)]))
            done.result()
    store.close()


class Wanted(NamedTuple):
    """A stored problem, and one of its responses."""

    prompt: npt.NDArray[np.int32]
    response: npt.NDArray[np.int32]


def wanted(folder: Path) -> tuple[Wanted, Wanted]:
    """Returns the problem that is loaded first, and the one that is loaded last."""
    reader = SQLiteSnapshot(folder)
    try:
        pages = list(reader.wanted_first())
        ends = []
        for problem in (pages[0][0], pages[-1][-1]):
            records = reader.history(problem)
            ends.append(Wanted(np.frombuffer(problem.prompt, np.int32), np.frombuffer(records[-1].tokens, np.int32)))
    finally:
        reader.close()
    return ends[0], ends[1]


class Run:
    """A server process of one version."""

    def __init__(self, folder: Path, path: str, log: Path) -> None:
        self.endpoint, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [sys.executable, "-m", "histospec.server", "serve", "--listen", self.endpoint, "--http", self.http]
        command += ["--data-dir", str(folder), "--memory", LIMIT, "--log-format", "json"]
        self.started = time.monotonic()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stderr=output, cwd=folder, env=os.environ | ({"PYTHONPATH": path} if path else {})
            )

    def seconds(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self.started

    def until(self, page: str) -> float:
        """Returns the seconds from the start until a page answers 200."""
        while self.seconds() < PATIENCE and self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://{self.http}{page}", timeout=5):
                return self.seconds()
            time.sleep(0.02)
        raise RuntimeError(f"{page} does not answer 200")

    def metrics(self) -> dict[str, float]:
        """Returns the samples without labels."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        families = text_string_to_metric_families(text)
        return {s.name: s.value for family in families for s in family.samples if not s.labels}

    def until_loaded(self) -> float:
        """Returns the seconds from the start until the store is loaded."""
        while self.seconds() < PATIENCE:
            metrics = self.metrics()
            if not metrics.get("histospec_loading", 0) and metrics["histospec_ready"]:
                return self.seconds()
            time.sleep(0.1)
        raise RuntimeError("it loads for too long")

    def until_drafted(self, what: Wanted, session: int) -> float:
        """Returns the seconds from the start until a draft has the stored response. Steps start when gRPC answers."""
        with grpc.insecure_channel(self.endpoint) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)
        stream = Stream(self.endpoint)
        stream.ask(opens=[opening(session, what.prompt, NAMESPACE)], step=_step(session, 0, what.response[:KNOWN]))
        position = KNOWN
        while self.seconds() < PATIENCE:
            time.sleep(EVERY)
            answer = stream.ask(step=_step(session, position, what.response[position : position + 1]))
            position += 1
            drafted = np.frombuffer(answer.tokens, np.int32)
            if len(drafted) >= SURE and np.array_equal(drafted, what.response[position : position + len(drafted)]):
                stream.end()
                return self.seconds()
            if position + SURE > len(what.response):
                return self.until_drafted(what, session + 2)
        raise RuntimeError("no draft")

    def memory(self) -> int:
        """Returns the peak memory of the process, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) * 1024

    def end(self, number: int) -> float:
        """Ends the process by a signal. Returns the seconds until it has ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        return time.monotonic() - began


def _step(session: int, position: int, tokens: npt.NDArray[np.int32]) -> pb.Step:
    return step([session], position, tokens[None].astype(np.int64))


def forget_pages(folder: Path) -> None:
    """Removes the file from the page cache, as after a boot."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def running(folder: Path, path: str) -> Iterator[Run]:
    """Runs a server and kills it at the end."""
    run = Run(folder, path, Path(tempfile.gettempdir(), "histospec-loading.log"))
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def start(folder: Path, path: str, end: int, cold: bool) -> dict[str, float]:
    """Measures one start after an end by a signal."""
    newest, oldest = wanted(folder)
    with running(folder, path) as run:
        run.until("/livez")
        time.sleep(0.5)
        run.end(end)
    if cold:
        forget_pages(folder)
    with running(folder, path) as run, ThreadPoolExecutor(4) as pool:
        drafts = [pool.submit(run.until_drafted, what, 1 + n) for n, what in enumerate((newest, oldest))]
        ready = run.until("/readyz")
        loaded = run.until_loaded()
        metrics = run.metrics()
        found = {
            "ready": ready,
            "newest": drafts[0].result(),
            "oldest": drafts[1].result(),
            "loaded": loaded,
            "tokens": metrics["histospec_history_tokens"],
            "cpu": metrics["process_cpu_seconds_total"],
            "memory": run.memory(),
        }
        found["stop"] = run.end(signal.SIGTERM)
    return found


def steps(folder: Path, path: str) -> tuple[float, float, float, float]:
    """Returns p50 and p99 of a small worker's steps in ms, while the server loads its store and afterwards."""
    with running(folder, path) as run:
        run.until("/livez")
        time.sleep(1.0)
        worker = Worker(run.endpoint)
        loading: list[float] = []
        while (more := run.metrics()) and (more.get("histospec_loading", 0) or not more["histospec_ready"]):
            loading += worker.until(seconds_over(2.0))
        time.sleep(2.0)
        quiet = worker.until(seconds_over(20.0))
        worker.end()
    return (*np.quantile(loading, [0.5, 0.99]), *np.quantile(quiet, [0.5, 0.99]))


def index(folder: Path, problems: int) -> float:
    """Returns the tokens per CPU-second of indexing the same responses, with one call per problem."""
    reader = SQLiteSnapshot(folder)
    histories = []
    for page in reader.wanted_first():
        histories += [(problem, reader.history(problem)) for problem in page]
        if len(histories) >= problems:
            break
    reader.close()
    engine = Engine(8 << 30)
    tokens, began = 0, time.process_time()
    for problem, records in histories:
        texts = [np.frombuffer(record.tokens, np.int32) for record in records]
        engine.ingest(
            NAMESPACE, np.frombuffer(problem.prompt, np.int32), texts, epochs=[r.epoch for r in records], stored=True
        )
        tokens += sum(map(len, texts))
    return tokens / (time.process_time() - began)


def main() -> None:
    """Makes the store, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "start", "steps", "index"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=4687)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8, help="responses of a problem in an epoch")
    parser.add_argument("--length", type=int, default=1500, help="tokens of a response")
    parser.add_argument("--other", default="", help="a folder with another version's package")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="the file is in the page cache")
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.problems, options.epochs, options.siblings, options.length)
    elif options.what == "index":
        print(f"{index(options.folder, 200) / 1e6:.1f} M tokens a second of CPU")
    else:
        _compare(options)


def _compare(options: argparse.Namespace) -> None:
    versions = {"before": options.other, "now": ""} if options.other else {"now": ""}
    if options.what == "steps":
        print(heading(["version", "p50, p99 while loading, ms", "afterwards"]), end="")
        for _ in range(options.rounds):
            for name, path in versions.items():
                one, two, three, four = steps(options.folder, path)
                print(line([name, f"{one:.1f}, {two:.1f}", f"{three:.1f}, {four:.1f}"]), end="", flush=True)
        return
    head = ["version", "ended by", "/readyz, s", "first draft: newest, oldest, s", "loaded, s", "M tokens/s"]
    print(heading([*head, "M tokens/s of CPU", "peak of the process, GiB", "stop, s"]), end="")
    for number in range(options.rounds):
        for name, path in versions.items():
            end = (signal.SIGKILL, signal.SIGTERM)[number % 2]
            found = start(options.folder, path, end, not options.warm)
            speed = found["tokens"] / 1e6
            cells = [f"{found['newest']:.1f}, {found['oldest']:.1f}", f"{found['loaded']:.1f}"]
            cells += [f"{speed / found['loaded']:.1f}"]
            cells += [f"{speed / found['cpu']:.1f}", f"{found['memory'] / (1 << 30):.1f}", f"{found['stop']:.1f}"]
            print(line([name, end.name, f"{found['ready']:.1f}", *cells]), end="", flush=True)


if __name__ == "__main__":
    main()
