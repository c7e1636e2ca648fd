"""What a step and an ingest cost, on real servers under `histospec bench`: the figures that scale_model.py fits."""

import contextlib
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from histospec.server.commands.bench_worker import WARM_STEPS

Figures = dict[str, float]
START_SECONDS = 60.0
PATIENT = 1.0  # seconds: no step goes without its drafts because another program had the core


@dataclass(frozen=True)
class Run:
    """One run of `histospec bench`.

    Attributes:
        shards: that serve; one has SQLite, several share a Redis.
        workers, batch, steps: as bench calls them.
        interval: seconds between the steps of a worker, long enough that the service waits most of the time.
        siblings: sessions of a problem on one worker.
        max_tokens: longest draft.
        responses, length, together: what is ingested for each problem, and how many responses a call.
        problems: at least so many.

    """

    shards: int = 1
    workers: int = 1
    batch: int = 256
    steps: int = 200
    interval: float = 0.03
    siblings: int = 16
    max_tokens: int = 16
    responses: int = 16
    length: int = 2000
    together: int = 16
    problems: int = 8


# CPU time is counted in hundredths of a second, so small steps have to be many.
MANY = {"steps": 1000, "interval": 0.01}
STEPS = [
    Run(batch=1, **MANY),
    Run(batch=16, **MANY),
    Run(batch=16, siblings=1, **MANY),
    Run(batch=64),
    Run(batch=64, max_tokens=4),
    Run(batch=64, siblings=1),
    Run(batch=64, workers=4),
    Run(),
    Run(max_tokens=4),
    Run(max_tokens=1),
    Run(siblings=1),
    Run(workers=2),
    Run(workers=4),
    Run(batch=1024, steps=100, interval=0.06),
    Run(batch=1024, max_tokens=4, steps=100, interval=0.06),
]
SHARDED = [
    run
    for shards in (2, 3)
    for run in (
        Run(shards, batch=16, siblings=1, **MANY),
        Run(shards, batch=64),
        Run(shards),
        Run(shards, workers=2),
        Run(shards, workers=4),
    )
]
_INGEST = {"batch": 1, "steps": 1}
INGESTS = [
    Run(problems=64, **_INGEST),
    Run(problems=32, together=1, **_INGEST),
    Run(problems=256, length=250, **_INGEST),
    Run(problems=64, length=250, together=1, **_INGEST),
    Run(problems=64, responses=4, length=4000, **_INGEST),
    Run(problems=512, responses=1, length=1000, together=1, **_INGEST),
]


def measure(rounds: int, quick: bool = False) -> list[Figures]:
    """Runs all of it, in another order in each round. -> one dict a Run: its fields, and medians of its figures.

    Where there is no redis-server, one shard only.
    """
    plan = {1: STEPS + INGESTS}
    if shutil.which("redis-server"):
        plan |= {shards: [run for run in SHARDED if run.shards == shards] for shards in (2, 3)}
    if quick:
        plan, rounds = {1: [Run(batch=1, steps=20), Run(batch=16, steps=20), INGESTS[-1]]}, 1
    found: dict[Run, list[Figures]] = {run: [] for runs in plan.values() for run in runs}
    for number in range(rounds):
        for shards, runs in plan.items():
            with service(shards) as (endpoints, http):
                idle = _idle(http)
                for run in random.Random(number).sample(runs, len(runs)):
                    figures = _bench(run, endpoints, http) | {"idle_cpu_ms_per_second": idle}
                    found[run].append(figures)
                    print(f"round {number}: {run} {figures['server_cpu_ms_per_step']:.2f} ms", file=sys.stderr)
    return [
        {**asdict(run), **{name: statistics.median(each[name] for each in figures) for name in figures[0]}}
        for run, figures in found.items()
    ]


@contextlib.contextmanager
def service(shards: int) -> Iterator[tuple[list[str], list[str]]]:
    """Real servers on free ports. -> "name=host:port" of gRPC and "host:port" of HTTP, one a shard."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = "sqlite" if shards == 1 else stack.enter_context(_redis(folder))
        endpoints, http = [], []
        for name in (f"shard-{i}" for i in range(shards)):
            command = [sys.executable, "-m", "histospec.server", "serve", "--log-format", "json", "--shard-name", name]
            command += ["--threads", "1"]  # what the model computes with
            command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", name, "--store", store]
            with (folder / f"{name}.log").open("wb") as log:
                stack.enter_context(_process(command, log, folder))
            listening = _listening(folder / f"{name}.log")
            endpoints.append(f"{name}={listening['grpc']}")
            http.append(listening["http"])
        yield endpoints, http


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
    with (folder / "redis.log").open("wb") as log, _process(command, log, folder):
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def _process(command: list[str], log: IO[bytes], folder: Path) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _listening(log: Path) -> dict[str, str]:
    """Waits for the line that carries the addresses. Raises RuntimeError if it does not come."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        for line in log.read_text().splitlines():
            if '"listening"' in line:
                return dict(json.loads(line))
        time.sleep(0.05)
    raise RuntimeError(f"the server did not come up: {log.read_text()}")


def _idle(http: list[str], seconds: float = 3.0) -> float:
    """CPU milliseconds a second of a shard that nobody asks."""
    before = _metric(http, "process_cpu_seconds_total")
    time.sleep(seconds)
    return 1e3 * (_metric(http, "process_cpu_seconds_total") - before) / seconds / len(http)


def _bench(run: Run, endpoints: list[str], http: list[str]) -> Figures:
    command = [sys.executable, "-m", "histospec.server", "bench", ",".join(endpoints), "--http", ",".join(http)]
    problems = max(run.problems, -(-run.batch * run.workers // run.siblings))
    options = {**asdict(run), "problems": problems, "ingesting": 2, "deadline": PATIENT, "json": "-"}
    del options["shards"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    before = _metric(http, "histospec_rpc_seconds_count", method="Draft")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tempfile.gettempdir())
    messages = _metric(http, "histospec_rpc_seconds_count", method="Draft") - before
    figures: Figures = json.loads(done.stdout)
    figures["messages_per_step"] = messages / (run.workers * (run.steps + WARM_STEPS))
    figures["worker_steps_per_second"] = figures["steps_per_second"] / run.workers
    return {name: value for name, value in figures.items() if name not in options}


def _metric(http: list[str], name: str, **labels: str) -> float:
    """The sum over all shards."""
    total = 0.0
    for address in http:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name)
        total += sum(s.value for s in samples if labels.items() <= s.labels.items())
    return total
