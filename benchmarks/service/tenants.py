"""Measures three tenants of a server under `histospec bench` each, alone and next to a hostile tenant.

The hostile tenant fills its share of the store, opens sessions up to its share, and names its namespaces like those of
others. Prints a Markdown table: the p99 of a step of each tenant alone; alone while an idle task that calls no server
takes what is left of a core; with the two others; with all; and with all but each with a server of its own on this
machine. These take turns. All callers but the measured one run as idle tasks, as if on other machines.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from benchmarks.tables import table
from examples.draft_server import running
from histospec.client import DraftClient, Response
from histospec.client.errors import HistoSpecError

TENANTS = ("team-a", "team-b", "team-c")
HOSTILE = "team-d"
LOOK_ALIKES = ("team-a", "team_a-run", "\u0442eam-a-run")  # the third one begins with a Cyrillic letter
STORE, SESSIONS, NAMESPACES = 24 << 20, 256, 64
LOAD = ("--batch", "64", "--problems", "32", "--responses", "8", "--length", "500", "--interval", "0.03")
"""A worker of 64 requests whose forward pass takes 30 ms."""
PATIENCE = "2"  # seconds of a step: a worker that gives up sooner would hide slow answers
WARM_SECONDS = 3.0  # until the others step
CONDITIONS = ("alone", "busy", "three", "hostile", "apart")
BASES = ("alone", "busy", "apart")
FIGURES = ("step_p50_ms", "step_p99_ms", "late_share", "unanswered_share")


def secret(tenant: str) -> str:
    """Returns the token of a tenant."""
    return f"{tenant}-secret-0123456789"


def token_file() -> str:
    """Returns the token file: each tenant has its namespaces and a share of each resource."""
    return "".join(
        f'[[token]]\nname = "{name}"\nsecret = "{secret(name)}"\nrights = ["read", "write", "admin"]\n'
        f"namespaces = {json.dumps([f'{name}-*'])}\n"
        f"shares = {{store = {STORE}, sessions = {SESSIONS}, namespaces = {NAMESPACES}}}\n"
        for name in (*TENANTS, HOSTILE)
    )


def _command(endpoint: str, tenant: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "histospec.server", "bench", endpoint, *LOAD, *options]
    return [*command, "--deadline", PATIENCE, "--namespace", f"{tenant}-run"]


def _environment(tenant: str) -> dict[str, str]:
    return os.environ | {"HISTOSPEC_TOKEN": secret(tenant)}


def bench(endpoint: str, tenant: str, steps: int) -> dict[str, float]:
    """Runs `histospec bench` as this tenant. Returns its figures."""
    command = _command(endpoint, tenant, "--steps", str(steps), "--json", "-")
    environment = _environment(tenant)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def idle_bench(endpoint: str, tenant: str) -> AbstractContextManager[None]:
    """Runs `histospec bench` as this tenant and as an idle task, until the block ends."""
    return _idle_process(_command(endpoint, tenant, "--steps", "1000000"), _environment(tenant))


@contextmanager
def _idle_process(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Runs a command as an idle task, until the block ends."""
    command = ["chrt", "--idle", "0", *command]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _idle() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread, and of those that it starts


class Hostile:
    """The fourth tenant. Counts what the server took and refused, and what it saw of others."""

    def __init__(self) -> None:
        self._endpoint = ""
        self._ending = threading.Event()
        self.took = self.refused = self.seen = 0

    @contextmanager
    def attacking(self, endpoint: str) -> Iterator[None]:
        """Attacks this server during the block, from three threads. They are idle tasks, as if on another machine."""
        self._endpoint = endpoint
        self._ending.clear()
        with ThreadPoolExecutor(3, initializer=_idle) as pool:
            threads = [pool.submit(work) for work in (self._fill, self._open, self._look)]
            try:
                yield
            finally:
                self._ending.set()
            for thread in threads:
                thread.result()

    def _client(self, namespace: str) -> DraftClient:
        return DraftClient(self._endpoint, namespace, token=secret(HOSTILE), deadline=1.0)

    def _fill(self) -> None:
        """Ingests until its share is full, and goes on."""
        text = np.arange(20_000, dtype=np.int32)
        with self._client(f"{HOSTILE}-fill") as client:
            for number in range(1 << 30):
                if self._ending.is_set():
                    return
                try:
                    client.ingest([number], [Response(text + number)] * 8, epoch=0)
                    self.took += 1
                except HistoSpecError:
                    self.refused += 1

    def _open(self) -> None:
        """Opens more sessions than its share, and steps with long texts."""
        with self._client(f"{HOSTILE}-open") as client:
            sessions = client.open([[number] for number in range(2 * SESSIONS)])
            while not self._ending.is_set():
                client.step(sessions, [range(32)] * len(sessions))

    def _look(self) -> None:
        """Asks for the history of others, under their names and under similar ones; fills its namespaces with both."""
        number = 0
        while not self._ending.is_set():
            for name in (*LOOK_ALIKES, *(f"{tenant}-run" for tenant in TENANTS), f"{HOSTILE}-team-a-{number}"):
                with self._client(name) as client, suppress(HistoSpecError):
                    self.seen += len(client.history([1])) if not name.startswith(f"{HOSTILE}-") else 0
                    client.drop_namespace()
                    client.ingest([1], [Response([2])], epoch=0)
                number += 1


def together(endpoints: Mapping[str, str], steps: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the figures of each tenant next to the others, each with the server of its name."""
    for name in TENANTS:
        with ExitStack() as others:
            for other in TENANTS:
                if other != name:
                    others.enter_context(idle_bench(endpoints[other], other))
            time.sleep(WARM_SECONDS)
            yield name, bench(endpoints[name], name, steps)


def turn(
    shared: str, own: Mapping[str, str], hostile: Hostile, steps: int
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yields the conditions, tenants and figures of one turn.

    `apart` has the processes of `hostile` and a server for each tenant, so it differs by what tenants share.
    """
    for name in TENANTS:
        yield "alone", name, bench(shared, name, steps)
        with _idle_process([sys.executable, "-c", "while True: pass"]):
            yield "busy", name, bench(shared, name, steps)
    one = dict.fromkeys(TENANTS, shared)
    for name, figures in together(one, steps):
        yield "three", name, figures
    with hostile.attacking(shared):
        for name, figures in together(one, steps):
            yield "hostile", name, figures
    with hostile.attacking(own[HOSTILE]):
        for name, figures in together(own, steps):
            yield "apart", name, figures


def main() -> None:
    """Prints the table, and what became of the responses that each tenant had stored before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, ExitStack() as servers:
        folder = Path(made)
        tokens = folder / "tokens.toml"
        tokens.write_text(token_file())

        def start(name: str) -> str:
            """Starts a server with the tokens of all tenants. Returns its endpoint."""
            arguments = ("--memory", "1GiB", "--tokens", str(tokens))
            return servers.enter_context(running(folder / name, folder / f"{name}.log", *arguments)).endpoint

        shared, own = start("shared"), {name: start(name) for name in (*TENANTS, HOSTILE)}
        kept = {name: DraftClient(shared, f"{name}-kept", token=secret(name)) for name in TENANTS}
        for client in kept.values():
            client.ingest([1], [Response([2, 3, 4])], epoch=0)
        hostile = Hostile()
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(options.turns):
            for condition, name, figures in turn(shared, own, hostile, options.steps):
                found.setdefault((condition, name), []).append(figures)
        lost = [name for name, client in kept.items() if len(client.history([1])) != 1]
    rows = []
    for name in TENANTS:
        middle = {
            condition: {f: statistics.median(some[f] for some in found[condition, name]) for f in FIGURES}
            for condition in CONDITIONS
        }
        for condition, figures in middle.items():
            ratios = [figures["step_p99_ms"] / middle[other]["step_p99_ms"] for other in BASES]
            cells = [f"{figures[figure]:.3g}" for figure in FIGURES]
            rows.append([f"{name}, {condition}", *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    print(table(["tenant, condition", *FIGURES, *(f"p99 / {base}" for base in BASES)], rows), end="")
    print(f"\nlost: {lost or 'nothing'}; the hostile tenant saw {hostile.seen} responses of others")
    print(f"it stored {hostile.took} batches of 0.6 MiB, and the server refused {hostile.refused}")


if __name__ == "__main__":
    main()
