"""`histospec status` with three different runs: it shows everything at any width, on a terminal or in a pipe."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from histospec.client import DraftClient
from tests.support.busy import Run
from tests.support.servers import Server, Starter

GAINED, MOVES, FIRST = "math-that-comes-back", "code-that-changes", "a-first-epoch"
HEADINGS = (
    "speed-up", "tokens per step", "accepted", "empty drafts", "cache hit rate", "verify cost", "Speed-up by run",
    "sessions", "problems", "responses", "tokens", "newest epoch", "namespace", "last ten minutes", "since the start",
    "shard", "address", "health", "open sessions", "tokens of history", "index", "responses evicted: memory full",
    "store", "free on the disk of the store",
)  # fmt: skip


@pytest.fixture(scope="module")
def busy(start_shared: Starter) -> Iterator[Server]:
    """Returns a server after three runs, whose workers are idle and connected."""
    server = start_shared("--shard-name", "shard-0", name="three-runs")
    with ExitStack() as stack:

        def worker(namespace: str, problems: int) -> Run:
            return Run(stack.enter_context(DraftClient(server.endpoint, namespace, deadline=5.0)), problems)

        gained, moves, first = worker(GAINED, 8), worker(MOVES, 8), worker(FIRST, 6)
        for _ in range(3):
            gained.rolls_out(0.02)
            moves.rolls_out(0.8)
        first.rolls_out(0.8)
        yield server


def status_of(server: Server) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(server.get("/status")[1])
    return status


def shown(server: Server, columns: int | None, *words: str) -> str:
    """Returns its output in a pipe, with or without COLUMNS."""
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    done = subprocess.run(
        [*command(server), *words], cwd="/", capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def on_a_terminal(server: Server, columns: int) -> str:
    """Returns its output on a terminal of this width."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    with subprocess.Popen(command(server), cwd="/", stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        text = b""
        while True:
            try:
                some = os.read(mine, 4096)
            except OSError:  # the other end is closed
                break
            if not some:
                break
            text += some
        os.close(mine)
        assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode()).replace("\r\n", "\n")


def command(server: Server) -> list[str]:
    return [sys.executable, "-m", "histospec.server", "status", server.endpoint, "--http", server.http]


def figures(status: dict[str, Any]) -> set[str]:
    """Returns everything that the tables contain, as it is written."""
    totals, recent = status["totals"], status["recent"]
    written = {f"{part['generated_tokens']:,.0f}" for part in (totals, recent)}
    for row in status["namespaces"]:
        written |= {row["name"], f"{row['history_tokens']:,.0f}", f"{row['verify_cost']:.2f}"}
        for gain in row["gains"].values():
            written |= {f"{gain['speedup']:.2f}x", f"{gain['tokens_per_step']:.2f}"}
            written |= {"-" if gain[k] is None else f"{gain[k]:.0%}" for k in ("acceptance", "empty", "known")}
    return written


@pytest.mark.parametrize("columns", [None, 200, 80, 40])
def test_no_width_loses_a_column(busy: Server, columns: int | None) -> None:
    text = shown(busy, columns)
    complete(text, status_of(busy), columns or 200)


@pytest.mark.parametrize("columns", [120, 66])
def test_no_terminal_loses_a_column(busy: Server, columns: int) -> None:
    complete(on_a_terminal(busy, columns), status_of(busy), columns)


def complete(text: str, status: dict[str, Any], columns: int) -> None:
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns
    words = set(text.split())
    missing = {word for heading in HEADINGS for word in heading.split()} - words
    assert not missing
    assert {word for figure in figures(status) for word in figure.split()} <= words


def test_a_pipe_has_each_row_in_a_line(busy: Server) -> None:
    """`grep` finds name and figures of a run on one line."""
    lines = shown(busy, None).splitlines()
    for row in status_of(busy)["namespaces"]:
        gain = row["gains"]["recent"]
        [line] = [line for line in lines if line.split()[:3] == [row["name"], "10", "min"]]
        assert line.split()[3:5] == [f"{gain['speedup']:.2f}x", f"{gain['tokens_per_step']:.2f}"]


def test_three_runs_are_told_apart(busy: Server) -> None:
    """Page, status and metrics use the same counters, and the run that gains is the one with repeated texts."""
    rows = {row["name"]: row for row in status_of(busy)["namespaces"]}
    assert set(rows) == {GAINED, MOVES, FIRST}
    speedups = {name: row["gains"]["totals"]["speedup"] for name, row in rows.items()}
    assert speedups[GAINED] > 1.5
    assert speedups[GAINED] > speedups[MOVES] + 0.3
    assert speedups[FIRST] == pytest.approx(1, abs=0.1)
    metrics = busy.metrics()
    for name, row in rows.items():

        def total(metric: str, name: str = name, **labels: str) -> float:
            return busy.total(f"histospec_{metric}_total", namespace=name, **labels)

        steps = total("drafts") + total("undrafted_tokens")
        cost = metrics[f'histospec_verify_cost{{namespace="{name}"}}']
        gain = row["gains"]["totals"]
        assert gain["steps"] == steps
        assert gain["tokens_per_step"] == pytest.approx(total("generated_tokens") / steps)
        paid = steps + cost * total("draft_tokens")
        assert gain["speedup"] == pytest.approx(total("generated_tokens") / paid)
        assert gain["empty"] == pytest.approx(total("drafts", result="empty") / total("drafts"))
    assert rows[FIRST]["why_not_more"] == "100% of the sessions have a problem without history"
    assert "Main limit" not in shown(busy, 200)
    assert f"{FIRST}: main limit: 100% of the sessions" in shown(busy, 200)


def test_rows_of_twins_are_there_where_twins_are(start_server: Starter) -> None:
    server = start_server()
    with DraftClient(server.endpoint, "run", deadline=5.0) as client:
        client.step(client.open([[1, 2]]), [[5]])
        assert "twin" not in shown(server, 80)
        client.step(client.open([[1, 2]], seeds=[7]), [[5]])
    assert "sessions with a seed that have a twin" in " ".join(shown(server, 120).split())
