"""Measures the cost of steps and ingests on real servers under `histospec bench`, for the model in model.py."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.scale.model import Figures
from benchmarks.turns import median_row
from examples.draft_server import DraftServer, free_port, running
from histospec.server.commands.bench_worker import WARM_STEPS

PATIENT = 1.0  # deadline in seconds, so long that no step misses it because another program has the core


@dataclass(frozen=True)
class Run:
    """One run of `histospec bench`.

    Attributes:
        shards: number of shards; one has SQLite, several share a Redis.
        workers, batch, steps: as in `histospec bench`.
        interval: seconds between the steps of a worker, long enough that the service is mostly idle.
        siblings: sessions per problem on one worker.
        max_tokens: longest draft.
        responses, length, together: responses ingested per problem, their length, and responses per call.
        problems: least number of problems.

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


# CPU time is counted in hundredths of a second, so small steps need many repetitions.
SMALL = Run(batch=16, steps=400)
STEPS = [
    replace(SMALL, batch=1),
    replace(SMALL, batch=1, interval=0.0),
    SMALL,
    replace(SMALL, siblings=1),
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
        replace(SMALL, shards=shards, siblings=1),
        Run(shards, batch=64),
        Run(shards),
        Run(shards, workers=2),
        Run(shards, workers=4),
    )
]
_INGEST = Run(batch=1, steps=1)
INGESTS = [
    replace(_INGEST, problems=64),
    replace(_INGEST, problems=32, together=1),
    replace(_INGEST, problems=256, length=250),
    replace(_INGEST, problems=64, length=250, together=1),
    replace(_INGEST, problems=64, responses=4, length=4000),
    replace(_INGEST, problems=512, responses=1, length=1000, together=1),
]


def measure(rounds: int, quick: bool = False) -> list[Figures]:
    """Makes all runs, in another order in each round. Returns one dict per Run: its fields, and medians of its figures.

    Without redis-server, it makes the runs with one shard only.
    """
    plan = {1: STEPS + INGESTS}
    if shutil.which("redis-server"):
        plan |= {shards: [run for run in SHARDED if run.shards == shards] for shards in (2, 3)}
    if quick:
        plan, rounds = {1: [Run(batch=1, steps=20), Run(batch=16, steps=20), INGESTS[-1]]}, 1
    found: dict[Run, list[Figures]] = {run: [] for runs in plan.values() for run in runs}
    for number in range(rounds):
        for shards, runs in plan.items():
            with service(shards) as servers:
                idle = _idle(servers.values())
                for run in random.Random(number).sample(runs, len(runs)):
                    figures = _bench(run, servers) | {"idle_cpu_ms_per_second": idle}
                    found[run].append(figures)
                    print(f"round {number}: {run} {figures['server_cpu_ms_per_step']:.2f} ms", file=sys.stderr)
    return [asdict(run) | median_row(figures) for run, figures in found.items()]


@contextlib.contextmanager
def service(shards: int) -> Iterator[dict[str, DraftServer]]:
    """Runs real servers; yields them by the name of their shard."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = "sqlite" if shards == 1 else stack.enter_context(_redis(folder))
        flags = ["--log-format", "json", "--store", store]
        servers: dict[str, DraftServer] = {}
        for name in (f"shard-{i}" for i in range(shards)):
            server = running(folder / name, folder / f"{name}.log", "--shard-name", name, *flags)
            servers[name] = stack.enter_context(server)
        yield servers


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[str]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
    with (
        (folder / "redis.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process,
    ):
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()


def _idle(servers: Iterable[DraftServer], seconds: float = 3.0) -> float:
    """Returns the CPU milliseconds per second of an idle shard."""
    before = [server.cpu_seconds() for server in servers]
    time.sleep(seconds)
    after = [server.cpu_seconds() for server in servers]
    return 1e3 * (sum(after) - sum(before)) / seconds / len(after)


def _answers(servers: Iterable[DraftServer]) -> tuple[float, float]:
    """Returns how many messages all shards together have answered, without rehearsals, and in how many seconds."""
    count, seconds = (
        sum(server.total(f"histospec_rpc_seconds_{figure}", method="Draft") for server in servers)
        for figure in ("count", "sum")
    )
    return count, seconds


def _bench(run: Run, servers: Mapping[str, DraftServer]) -> Figures:
    endpoints = ",".join(f"{name}={server.endpoint}" for name, server in servers.items())
    http = ",".join(server.http for server in servers.values())
    command = [sys.executable, "-m", "histospec.server", "bench", endpoints, "--http", http]
    problems = max(run.problems, -(-run.batch * run.workers // run.siblings))
    options = {**asdict(run), "problems": problems, "ingesting": 2, "deadline": PATIENT, "json": "-"}
    del options["shards"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    count, seconds = _answers(servers.values())
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tempfile.gettempdir())
    answered, answering = _answers(servers.values())
    figures: Figures = json.loads(done.stdout)
    figures["messages_per_step"] = (answered - count) / (run.workers * (run.steps + WARM_STEPS))
    figures["answer_ms"] = 1e3 * (answering - seconds) / max(1.0, answered - count)
    figures["worker_steps_per_second"] = figures["steps_per_second"] / run.workers
    return {name: value for name, value in figures.items() if name not in options}
