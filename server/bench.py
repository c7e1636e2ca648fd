"""`histospec bench ENDPOINT`: loads a running service as rollout workers do, and says what it takes.

Workers are processes of their own, each with a `DraftClient` and a batch of sessions that replay written responses:
what a draft has right is accepted, and one more token is generated. Before that, the history is ingested.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from threading import BrokenBarrierError

import numpy as np
from rich.console import Console
from rich.table import Table

from histospec.client import DraftClient, Response
from histospec.client.errors import ConfigurationError
from histospec.client.errors import HistoSpecError as ClientError
from histospec.server.arguments import ArgumentParser
from histospec.server.bench_worker import CONNECT_SECONDS, Load, Measured, Task, generated, roll_out
from histospec.server.config import Address
from histospec.server.errors import ConfigError, Unavailable
from histospec.server.reader import read_status
from histospec.server.recordings import RecordingError, read


def main(argv: Sequence[str]) -> int:
    """Prints a table, and JSON where asked; returns 1 where the service cannot be reached."""
    parser = ArgumentParser(prog="histospec bench", description="Measure a draft service under load.")
    parser.add_argument("endpoint", metavar="HOST:PORT[,...]", help="every shard, as workers are told of them")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="sessions of each (default: 256)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each (default: 300)")
    parser.add_argument("--interval", type=float, default=0.0, metavar="SECONDS", help="between steps (default: 0)")
    parser.add_argument("--deadline", type=float, default=0.02, metavar="SECONDS", help="of a step (default: 0.02)")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="longest draft (default: 16)")
    parser.add_argument(
        "--verify-cost",
        type=float,
        default=0.05,
        metavar="C",
        help="of a drafted token, in plain steps (default: 0.05)",
    )
    parser.add_argument("--rollouts", type=Path, metavar="FILE.jsonl[.gz]", help="recorded ones (default: generated)")
    parser.add_argument("--problems", type=int, default=256, metavar="N", help="so many of them (default: 256)")
    parser.add_argument("--responses", type=int, default=16, metavar="N", help="history of each (default: 16)")
    parser.add_argument("--siblings", type=int, default=16, metavar="N", help="sessions of a problem (default: 16)")
    parser.add_argument("--length", type=int, default=2000, metavar="N", help="tokens of a response (default: 2000)")
    parser.add_argument("--ingesting", type=int, default=8, metavar="N", help="ingests side by side (default: 8)")
    parser.add_argument("--together", type=int, metavar="N", help="responses of an ingest (default: all of a problem)")
    parser.add_argument("--namespace", default="bench", help="dropped before and after (default: bench)")
    parser.add_argument("--http", metavar="HOST:PORT[,...]", help="/status of the shards, for their CPU time")
    parser.add_argument("--json", metavar="FILE", help="the figures, too; - for standard output")
    options = parser.parse_args(list(argv))
    numbers = ("workers", "batch", "steps", "problems", "responses", "siblings", "length", "ingesting", "together")
    for name in numbers:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name}: must be at least 1, is {value}")
    try:
        http = [Address.parse(text) for text in (options.http or "").split(",") if text.strip()]
    except ValueError as error:
        raise ConfigError(f"--http: {error}") from None
    load = Load(
        options.endpoint, options.namespace, options.batch, options.steps, options.interval, options.deadline,
        options.max_tokens, options.verify_cost,
    )  # fmt: skip
    try:
        tasks = _tasks(options.rollouts, options.problems, options.responses, options.siblings, options.length)
        figures = measure(load, tasks, options.workers, options.ingesting, options.together, http)
    except ConfigurationError as error:
        raise ConfigError(str(error)) from None
    except (ClientError, OSError, RecordingError, Unavailable) as error:
        sys.stderr.write(f"histospec bench: {error}\n")
        return 1
    out = Console(stderr=options.json == "-")
    out.print(_table(figures))
    if options.json:
        text = json.dumps(figures, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return 0


def _tasks(recorded: Path | None, problems: int, responses: int, siblings: int, length: int) -> list[Task]:
    """Problems, what is known of them, and what is still to be written."""
    if recorded is None:
        return [generated(number, responses, siblings, length) for number in range(problems)]
    tasks = []
    with recorded.open("rb") as file:
        for problem in islice(read(file), problems):
            last = problem.epochs()[-1]
            known = [response.flat() for response in problem.responses if response.epoch < last]
            texts = [response.flat() for response in problem.responses if response.epoch == last]
            tasks.append(Task(problem.prompt, known[-responses:], texts[:siblings]))
    return tasks


def measure(
    load: Load, tasks: list[Task], workers: int, ingesting: int, together: int | None, http: Sequence[Address]
) -> dict[str, float]:
    """Ingests the history, runs the workers, forgets everything again. -> figures by name."""
    with DraftClient(load.endpoint, load.namespace) as client:
        client.drop_namespace()
        ingest_busy = _cpu_seconds(http)
        ingest_seconds = _ingest(load, tasks, ingesting, together)
        ingest_busy = _cpu_seconds(http) - ingest_busy
        runs, seconds, busy = _run(load, tasks, workers, http)
        client.drop_namespace()
    tokens = max(1, sum(len(text) for task in tasks for text in task.history))
    steps = np.concatenate([run.seconds for run in runs])
    count = len(steps)
    middle, high, highest = np.quantile(steps, [0.5, 0.99, 0.999]).tolist()
    written = sum(run.tokens for run in runs)
    return {
        "ingest_tokens_per_second": tokens / ingest_seconds,
        "ingest_cpu_ns_per_token": 1e9 * ingest_busy / tokens,
        "steps_per_second": count / seconds,
        "tokens_per_second": written / seconds,
        "tokens_per_step": written / (count * load.batch),
        "drafted_per_step": sum(run.drafted for run in runs) / (count * load.batch),
        "step_p50_ms": 1e3 * middle,
        "step_p99_ms": 1e3 * high,
        "step_p999_ms": 1e3 * highest,
        "late_share": sum(run.late for run in runs) / count,
        "client_cpu_ms_per_step": 1e3 * sum(run.cpu for run in runs) / count,
        "server_cpu_ms_per_step": 1e3 * busy / count,
    } | {name: float(value) for name, value in asdict(load).items() if isinstance(value, int | float)}


def _ingest(load: Load, tasks: Sequence[Task], side_by_side: int, together: int | None) -> float:
    clients = [DraftClient(load.endpoint, load.namespace) for _ in range(side_by_side)]

    def ingest(number: int) -> None:
        for task in tasks[number::side_by_side]:
            responses = [Response(text) for text in task.history]
            for start in range(0, len(responses), together or len(responses)):
                clients[number].ingest(task.prompt, responses[start:][:together], epoch=0)

    with ThreadPoolExecutor(side_by_side) as pool:
        started = time.perf_counter()
        list(pool.map(ingest, range(side_by_side)))
        seconds = time.perf_counter() - started
    for client in clients:
        client.shutdown()
    return seconds


def _run(load: Load, tasks: list[Task], workers: int, http: Sequence[Address]) -> tuple[list[Measured], float, float]:
    """All workers at the same time. -> what they saw, seconds and CPU seconds of the shards, once each is warm."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(workers + 1), spawn.SimpleQueue()
    processes = [
        spawn.Process(target=roll_out, args=(load, tasks[number::workers] or tasks, barrier, results))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    with suppress(BrokenBarrierError):  # its worker says why
        barrier.wait(CONNECT_SECONDS)
    busy, started = _cpu_seconds(http), time.perf_counter()
    runs = []
    for _ in processes:
        result = results.get()
        if isinstance(result, str):
            raise ClientError(result)
        runs.append(result)
    seconds, busy = time.perf_counter() - started, _cpu_seconds(http) - busy
    for process in processes:
        process.join()
    return runs, seconds, busy


def _cpu_seconds(http: Sequence[Address]) -> float:
    """CPU time of the shards so far; 0 where nobody said where to read it. Raises Unavailable."""
    return sum(float(read_status(address, 10)["cpu_seconds"]) for address in http)


def _table(figures: dict[str, float]) -> Table:
    table = Table("what", "figure")
    rows = {
        "ingest, tokens a second": f"{figures['ingest_tokens_per_second']:,.0f}",
        "steps a second": f"{figures['steps_per_second']:,.1f}",
        "tokens a second": f"{figures['tokens_per_second']:,.0f}",
        "tokens a session and step": f"{figures['tokens_per_step']:.2f}",
        "drafted a session and step": f"{figures['drafted_per_step']:.2f}",
        "step, p50": f"{figures['step_p50_ms']:.2f} ms",
        "step, p99": f"{figures['step_p99_ms']:.2f} ms",
        "step, p99.9": f"{figures['step_p999_ms']:.2f} ms",
        "late": f"{figures['late_share']:.2%}",
        "CPU of the service, a million tokens ingested": f"{figures['ingest_cpu_ns_per_token']:.1f} ms",
        "CPU of the client, a step": f"{figures['client_cpu_ms_per_step']:.2f} ms",
        "CPU of the service, a step": f"{figures['server_cpu_ms_per_step']:.2f} ms",
    }
    for what, figure in rows.items():
        table.add_row(what, figure)
    return table
