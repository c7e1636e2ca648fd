"""`histospec bench` against real servers."""

import json
import operator
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from histospec.client.errors import HistoSpecError
from histospec.server.commands.bench_worker import Workers
from tests.support import certificates, children
from tests.support.children import Child
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

SMALL = ["--batch", "8", "--steps", "5", "--problems", "4", "--responses", "3", "--siblings", "4", "--length", "80"]


def bench(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "histospec.server", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_figures_of_a_running_service(start_server: Starter, tmp_path: Path) -> None:
    servers = [start_server(), start_server()]
    endpoint, http = (",".join(getattr(s, name) for s in servers) for name in ("endpoint", "http"))
    options = ["--workers", "2", "--deadline", "5", "--http", http, "--json", "-"]
    done = bench(endpoint, *SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["late_share"] == 0
    assert figures["tokens_per_step"] > 1.3  # drafts come from the history
    assert figures["step_p50_ms"] <= figures["step_p99_ms"] <= figures["step_p999_ms"]
    assert figures["drafted_per_step"] >= figures["tokens_per_step"] - 1  # accepted tokens were drafted
    assert figures["server_cpu_ms_per_step"] > 0
    assert figures["ingest_cpu_ns_per_token"] > 0
    assert "tokens per session and step" in done.stderr
    metrics = [server.metrics() for server in servers]
    assert sum(m["histospec_ingested_responses_total"] for m in metrics) == 12
    statuses = [json.loads(server.get("/status")[1])["totals"] for server in servers]
    assert sum(totals["generated_tokens"] for totals in statuses) > 2 * 8 * 5
    assert all(m["histospec_history_tokens"] == 0 for m in metrics)  # bench drops its namespace


def test_steps_of_an_outage_are_counted(server: Server, tmp_path: Path) -> None:
    """While the shard is away, its clients send it no steps, so none of these is late."""
    options = ["--steps", "1500", "--interval", "0.01", "--deadline", "5", "--json", "figures.json"]
    with children.histospec("bench", server.endpoint, *SMALL, *options, cwd=tmp_path) as running:

        def measures() -> bool:
            """Whether there are more tokens than those of the first steps, which warm caches and do not count.

            The bench stands still meanwhile: on a busy machine, it could end during one look at the metrics.
            """
            os.killpg(running.pid, signal.SIGSTOP)
            if server.total("histospec_generated_tokens_total") > 3_000:  # of 41,000
                return True
            os.killpg(running.pid, signal.SIGCONT)
            time.sleep(1)
            return False

        try:
            eventually(measures, "it does not go on")
            server.kill()
        finally:
            os.killpg(running.pid, signal.SIGCONT)
        running.wait_for("WITHOUT drafts")  # or a step could wait until the server is back
        server.start()
        assert running.end()[0] == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["unanswered_share"] > figures["late_share"]


def test_a_service_with_tls_and_tokens(start_server: Starter, tmp_path: Path) -> None:
    certificates.issue(tmp_path, trustme.CA())
    (tmp_path / "token").write_text("a-secret-0123456789\n")
    (tmp_path / "tokens.toml").write_text(
        '[[token]]\nname = "bench"\nsecret = "a-secret-0123456789"\nrights = ["read", "write", "admin"]\n'
    )
    server = start_server(*certificates.of_server(tmp_path), "--tokens", str(tmp_path / "tokens.toml"))
    assert bench(server.endpoint, *SMALL, "--tls-ca", "ca.pem", cwd=tmp_path).returncode == 1
    options = ["--deadline", "5", "--tls-ca", "ca.pem", "--token-file", "token", "--json", "-"]
    done = bench(server.endpoint, *SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_per_step"] > 1.3


def test_recorded_rollouts(start_server: Starter, tmp_path: Path) -> None:
    recording = tmp_path / "recorded.jsonl"
    text = list(range(60))
    lines = [
        {"prompt": [p], "responses": [{"epoch": e, "tokens": [p + t for t in text]} for e in (0, 0, 1)]}
        for p in range(3)
    ]
    recording.write_text("\n".join(map(json.dumps, lines)))
    server = start_server()
    options = ["--rollouts", str(recording), "--deadline", "5", "--json", "-"]
    done = bench(server.endpoint, *SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_per_step"] > 3
    assert server.metrics()["histospec_ingested_responses_total"] == 6


def test_ingests_of_some_responses(start_server: Starter, tmp_path: Path) -> None:
    server = start_server()
    done = bench(server.endpoint, *SMALL, "--together", "2", "--deadline", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = server.metrics()
    assert metrics["histospec_ingested_responses_total"] == 12
    assert metrics['histospec_rpc_seconds_count{method="Ingest"}'] == 8  # 4 problems with 2 + 1 ingests


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["127.0.0.1:9", *SMALL], 1, "histospec bench: "),
        (["nowhere"], 2, "endpoint: 'nowhere' is not of the form host:port"),
        (["127.0.0.1:9", "--batch", "0"], 2, "--batch: must be at least 1, is 0"),
        (["127.0.0.1:9", "--workers", "1000000"], 2, "--workers: must be at most 256, is 1000000"),
        (["127.0.0.1:9", "--steps", "9" * 5000], 2, "--steps: must be a whole number, is '999"),
        (["127.0.0.1:9", "--interval", "nan"], 2, "--interval: must be at least 0, is nan"),
        (["127.0.0.1:9", "--deadline", "inf"], 2, "--deadline: must be at most 3600, is inf"),
        (["127.0.0.1:9", "--json", "absent/x.json"], 2, "absent/x.json: cannot make a file in this folder"),
        (["127.0.0.1:9", "--together", "0"], 2, "--together: must be at least 1, is 0"),
        (["127.0.0.1:9", "--rollouts", "absent.jsonl"], 2, "absent.jsonl: no such file"),
    ],
)
def test_what_goes_wrong_is_one_sentence(tmp_path: Path, arguments: list[str], code: int, sentence: str) -> None:
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


LONG = ["--workers", "2", "--batch", "8", "--steps", "1000000", "--problems", "4", "--length", "80", "--deadline", "5"]


def namespaces(server: Server) -> list[str]:
    return [namespace["name"] for namespace in json.loads(server.get("/status")[1])["namespaces"]]


def workers(bench: Child) -> list[int]:
    """Returns the worker processes of a bench, without multiprocessing's resource tracker."""
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def runs(pid: int) -> bool:
    """Returns whether a process runs; an ended one may not have been reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def running(server: Server) -> Iterator[tuple[Child, list[int]]]:
    """Starts a bench in a namespace of its own; it is in the middle of its steps."""
    with children.histospec("bench", server.endpoint, *LONG) as bench:
        eventually(lambda: server.metrics()["histospec_sessions"] == 16, "they do not start")
        assert len(namespaces(server)) == 1
        assert namespaces(server)[0].startswith("bench-")
        pids = workers(bench)
        assert len(pids) == 2
        yield bench, pids
        assert not any(map(runs, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_ends_it_its_workers_and_its_namespace(
    server: Server, running: tuple[Child, list[int]], number: int, send: Callable[[int, int], None]
) -> None:
    bench, pids = running
    send(bench.pid, number)
    assert bench.end() == (128 + number, "")
    assert not any(map(runs, pids))
    assert namespaces(server) == []
    eventually(lambda: server.metrics()["histospec_sessions"] == 0, "sessions are left")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_that_dies_ends_it(server: Server, running: tuple[Child, list[int]], number: int) -> None:
    bench, pids = running
    os.kill(pids[1], number)
    code, text = bench.end()
    assert code == 1
    name = signal.Signals(number).name
    assert re.fullmatch(rf"histospec bench: worker [12] of 2 \(process {pids[1]}\) was ended by {name}\n", text)
    assert not runs(pids[0])
    assert namespaces(server) == []


def test_workers_end_with_a_parent_that_was_killed(server: Server, running: tuple[Child, list[int]]) -> None:
    bench, pids = running
    bench.send_signal(signal.SIGKILL)
    eventually(lambda: not any(map(runs, pids)), "workers are left")


def test_a_worker_says_what_went_wrong() -> None:
    with (
        pytest.raises(HistoSpecError, match=r"worker 1 of 1: unsupported operand"),
        Workers(operator.truediv, [(0,)]) as running,
    ):
        running.receive()


def test_a_signal_while_it_ingests_leaves_no_namespace(server: Server) -> None:
    much = ["--problems", "500", "--responses", "100", "--siblings", "1", "--length", "20", "--together", "1"]
    with children.histospec("bench", server.endpoint, *much) as bench:
        eventually(lambda: server.metrics()["histospec_ingested_responses_total"] > 10, "it does not ingest")
        bench.send_signal(signal.SIGTERM)
        assert bench.end() == (143, "")
    assert namespaces(server) == []
