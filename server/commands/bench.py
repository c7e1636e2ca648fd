"""`histospec bench ENDPOINT`: loads a running service as rollout workers do, and measures it.

Each worker is a process with a `DraftClient` and a batch of sessions, which replay known responses: a session accepts
the correct part of a draft and generates one more token. The command ingests the history first.
"""

import argparse
import json
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import islice
from threading import Event

import numpy as np
from rich.console import Console
from rich.table import Table

from histospec.client import Response
from histospec.client.config import Tls, bearer, configure
from histospec.client.errors import ConfigurationError
from histospec.client.errors import HistoSpecError as ClientError
from histospec.protocol.costs import DEFAULT_DEADLINE, DEFAULT_VERIFY_COST
from histospec.protocol.limits import MAX_DRAFT
from histospec.replay.recordings import opened, read
from histospec.server.arguments import MOST_COST, ArgumentParser, amount, whole
from histospec.server.commands.bench_worker import BenchProblem, Load, Measured, Workers, generated, roll_out
from histospec.server.commands.connection import add_options, caller, files, http_addresses, read_status
from histospec.server.errors import ConfigError, Unavailable
from histospec.server.output_file import FORCE, is_stdout, keep_apart, written
from histospec.server.process import run_loop
from histospec.server.settings.addresses import Address

DECODING = 0.03  # seconds from step to step of a worker: after such a pause, a step takes twice as long as without
PATIENCE = 5.0  # seconds that running ingests may take after one failed or a signal arrived


def main(argv: Sequence[str]) -> int:
    """Prints a table, and writes JSON if asked. Raises HistoSpecError, for example if the service is unreachable."""
    options = _parser().parse_args(list(argv))
    keep_apart([("--json", options.json)], [("--rollouts", options.rollouts), *files(vars(options))])
    http = http_addresses(options.http)
    load = Load(
        options.endpoint, options.namespace or f"bench-{secrets.token_hex(4)}", options.batch, options.steps,
        options.interval, options.deadline, options.max_tokens, options.verify_cost, *_credentials(options),
    )  # fmt: skip
    out = Console(stderr=options.json is not None and is_stdout(options.json))
    with ExitStack() as targets:
        file = targets.enter_context(written(options.json, force=options.force)) if options.json else None
        try:
            configure(load.endpoint, load.namespace)
            tasks = _tasks(options.rollouts, options.problems, options.responses, options.siblings, options.length)
            figures = measure(load, tasks, options.workers, options.ingesting, options.together, http)
        except ConfigurationError as error:
            raise ConfigError(str(error)) from None
        except ClientError as error:
            raise Unavailable(str(error)) from None
        out.print(_table(figures))
        if file is not None:
            file.write((json.dumps(figures, indent=1) + "\n").encode())
    return 0


def _credentials(options: argparse.Namespace) -> tuple[str | None, Tls | None]:
    """Returns the token and the certificates that the options or the environment name. Raises ConfigError."""
    config = caller(options.endpoint, options)
    return bearer(config), config.tls


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="histospec bench", description="Measure a draft service under load.")
    parser.add_argument("endpoint", metavar="HOST:PORT[,...]", help="all shards, as for a worker")
    count = whole(1, 1 << 20)
    for flag, kind, default, metavar, text in (
        ("--workers", whole(1, 256), 1, "N", "processes"),
        ("--batch", count, 256, "N", "sessions per process"),
        ("--steps", whole(1, 10**7), 300, "N", "steps to run"),
        ("--interval", amount(0, 3600), DECODING, "SECONDS", "time between steps, as a GPU decodes; 0: none"),
        ("--deadline", amount(0, 3600, above=True), DEFAULT_DEADLINE, "SECONDS", "deadline of a step"),
        ("--max-tokens", whole(1, MAX_DRAFT), 16, "N", "maximum draft tokens"),
        ("--verify-cost", amount(0, MOST_COST), DEFAULT_VERIFY_COST, "C",
         "cost of verifying a draft token, in steps without drafts"),
        ("--rollouts", str, None, "FILE.jsonl[.gz]", "recorded rollouts (default: generated ones)"),
        ("--problems", count, 256, "N", "problems to use"),
        ("--responses", count, 16, "N", "history per problem"),
        ("--siblings", count, 16, "N", "sessions per problem"),
        ("--length", count, 2000, "N", "tokens per response"),
        ("--ingesting", whole(1, 256), 8, "N", "concurrent ingests"),
        ("--together", count, None, "N", "responses per ingest (default: all of a problem)"),
        ("--namespace", str, None, "NAME", "namespace, dropped before and after (default: a new one, bench-...)"),
        ("--http", str, None, "HOST:PORT[,...]", "HTTP addresses of the shards, for CPU time"),
        ("--json", str, None, "FILE", "also write the figures to FILE; - for standard output"),
    ):  # fmt: skip
        help_ = text if default is None else f"{text} (default: {default:g})"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=help_)
    add_options(parser)
    parser.add_argument("--force", action="store_true", help=FORCE)
    return parser


def _tasks(recorded: str | None, problems: int, responses: int, siblings: int, length: int) -> list[BenchProblem]:
    """Returns problems with their history and the responses that sessions will write."""
    if recorded is None:
        return [generated(number, responses, siblings, length) for number in range(problems)]
    tasks = []
    with opened(recorded) as file:
        for problem in islice(read(file), problems):
            last = problem.epochs()[-1]
            known = [response.flat() for response in problem.responses if response.epoch < last]
            texts = [response.flat() for response in problem.responses if response.epoch == last]
            tasks.append(BenchProblem(problem.prompt, known[-responses:], texts[:siblings]))
    return tasks


def measure(
    load: Load, tasks: list[BenchProblem], workers: int, ingesting: int, together: int | None, http: Sequence[Address]
) -> dict[str, float]:
    """Ingests the history, runs the workers and drops the namespace. Returns figures by name."""
    with load.client() as client:
        client.drop_namespace()
        try:
            ingest_busy = _cpu_seconds(http)
            ingest_seconds = _ingest(load, tasks, ingesting, together)
            ingest_busy = _cpu_seconds(http) - ingest_busy
            runs, seconds, busy = _run(load, tasks, workers, http)
        except BaseException:
            with suppress(ClientError):  # report the original error, not this one
                client.drop_namespace()
            raise
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
        "late_share": sum(run.late for run in runs) / workers,
        "unanswered_share": sum(run.unanswered for run in runs) / workers,
        "client_cpu_ms_per_step": 1e3 * sum(run.cpu for run in runs) / count,
        "server_cpu_ms_per_step": 1e3 * busy / count,
    } | {name: float(value) for name, value in asdict(load).items() if isinstance(value, int | float)}


def _ingest(load: Load, tasks: Sequence[BenchProblem], side_by_side: int, together: int | None) -> float:
    clients = [load.client() for _ in range(side_by_side)]
    ending = Event()

    def ingest(number: int) -> None:
        for task in tasks[number::side_by_side]:
            responses = [Response(text) for text in task.history]
            for start in range(0, len(responses), together or len(responses)):
                if ending.is_set():
                    return
                clients[number].ingest(task.prompt, responses[start:][:together], epoch=0)

    pool = ThreadPoolExecutor(side_by_side)
    started = time.perf_counter()
    threads = [pool.submit(ingest, number) for number in range(side_by_side)]
    try:
        for thread in threads:
            thread.result()
        seconds = time.perf_counter() - started
    finally:
        ending.set()
        wait(threads, PATIENCE)  # an ingest after the drop would create the namespace again
        pool.shutdown(wait=False)
    for client in clients:
        client.shutdown()
    return seconds


def _run(
    load: Load, tasks: list[BenchProblem], workers: int, http: Sequence[Address]
) -> tuple[list[Measured], float, float]:
    """Runs all workers at once. Returns their figures, and the shards' seconds and CPU seconds once all are warm."""
    shares = [(load, tasks[number::workers] or tasks) for number in range(workers)]
    with Workers(roll_out, shares) as running:
        running.receive()
        busy, started = _cpu_seconds(http), time.perf_counter()
        for number in range(workers):
            running.send(number, "go")
        runs: list[Measured] = running.receive()
        seconds, busy = time.perf_counter() - started, _cpu_seconds(http) - busy
    return runs, seconds, busy


def _cpu_seconds(http: Sequence[Address]) -> float:
    """Returns the CPU time of the shards so far; 0 without their HTTP addresses. Raises Unavailable."""
    return sum(float(run_loop(read_status(address, 10))["cpu_seconds"]) for address in http)


def _table(figures: dict[str, float]) -> Table:
    table = Table("what", "figure")
    rows = {
        "ingest, tokens per second": f"{figures['ingest_tokens_per_second']:,.0f}",
        "time between steps": f"{1e3 * figures['interval']:g} ms",
        "steps per second": f"{figures['steps_per_second']:,.1f}",
        "tokens per second": f"{figures['tokens_per_second']:,.0f}",
        "tokens per session and step": f"{figures['tokens_per_step']:.2f}",
        "draft tokens per session and step": f"{figures['drafted_per_step']:.2f}",
        "step, p50": f"{figures['step_p50_ms']:.2f} ms",
        "step, p99": f"{figures['step_p99_ms']:.2f} ms",
        "step, p99.9": f"{figures['step_p999_ms']:.2f} ms",
        "late": f"{figures['late_share']:.2%}",
        "without an answer, late ones included": f"{figures['unanswered_share']:.2%}",
        "server CPU per million ingested tokens": f"{figures['ingest_cpu_ns_per_token']:.1f} ms",
        "client CPU per step": f"{figures['client_cpu_ms_per_step']:.2f} ms",
        "server CPU per step": f"{figures['server_cpu_ms_per_step']:.2f} ms",
    }
    for what, figure in rows.items():
        table.add_row(what, figure)
    return table
