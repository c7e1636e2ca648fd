"""Measures steps of a worker, histories of another caller and memory of the server, while further callers attack it.

The worker and another caller have a token of their own. Each attack runs in processes of its own as an idle task, as if
it were on other machines, by turns with times without it. Prints a Markdown table.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from benchmarks.process import MIB, Child
from benchmarks.service.pressure import Metadata, Stream, Worker, i32, seconds_over
from benchmarks.tables import heading, line
from examples.draft_server import DraftServer, running
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc
from tests.support.raw_http2 import RawHttp2, message

TURN = 5.0  # seconds of each turn
SERVICE = "/histospec.v1.DraftService"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UPDATE = "/specrl.RolloutCacheService/UpdateCache"
UNFINISHED = 60 * MIB
LARGE = 12  # responses of 4 MiB
LOOK_ALIKES = 2000
NESTED_TOKENS = 500
TOKENS = """
[[token]]
name = "worker"
secret = "worker-secret-0123456789"
rights = ["read", "write"]
namespaces = ["worker", "caller"]
[[token]]
name = "attacker"
secret = "attacker-secret-0123456789"
rights = ["read", "write", "admin"]
namespaces = ["attack*", "specrl"]
"""
WORKER, ATTACKER = "worker-secret-0123456789", "attacker-secret-0123456789"


def metadata(secret: str) -> Metadata:
    """Returns the metadata of a call with this token."""
    return (("authorization", f"Bearer {secret}"),)


class Caller:
    """Another caller, which asks for a short history again and again."""

    def __init__(self, endpoint: str) -> None:
        self._stub = pb_grpc.DraftServiceStub(grpc.insecure_channel(endpoint))
        response = pb.Response(tokens=i32([2]))
        request = pb.IngestRequest(namespace="caller", prompt=i32([1]), responses=[response])
        self._stub.Ingest(request, metadata=metadata(WORKER))

    def until(self, end: float) -> list[float]:
        """Calls until a time by the clock of `time.monotonic`. Returns the milliseconds of each answer."""
        request, taken = pb.HistoryRequest(namespace="caller", prompt=i32([1])), []
        while time.monotonic() < end:
            started = time.perf_counter()
            self._stub.History(request, timeout=60, metadata=metadata(WORKER))
            taken.append(1e3 * (time.perf_counter() - started))
            time.sleep(0.01)
        return taken


class Attack:
    """The attacks; each method runs in a process of its own until a time by the clock of `time.monotonic`."""

    def __init__(self, endpoint: str) -> None:
        # See `pressure.Load`. Under `chrt -r 10`, which gives the benchmark priority over other work, attacks have
        # priority over that work, too: otherwise they would not run.
        policy = os.SCHED_RR if os.sched_getscheduler(0) == os.SCHED_RR else os.SCHED_IDLE
        os.sched_setscheduler(0, policy, os.sched_param(1 if policy == os.SCHED_RR else 0))
        self._endpoint = endpoint
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(endpoint, options=options)
        self._stub = pb_grpc.DraftServiceStub(self._channel)
        self._random = np.random.default_rng(0)

    # What attacks need

    def large_history(self) -> None:
        """Ingests a history of 48 MiB."""
        for _ in range(LARGE):
            response = pb.Response(tokens=i32(self._random.integers(0, 50_000, MIB)))
            self._ingest(pb.IngestRequest(namespace="attack", prompt=i32([1]), responses=[response]))

    def short_history(self) -> None:
        """Ingests a history that takes no place for large answers."""
        responses = [pb.Response(tokens=i32(self._random.integers(0, 50_000, 1500))) for _ in range(40)]
        self._ingest(pb.IngestRequest(namespace="attack", prompt=i32([2]), responses=responses))

    def look_alikes(self) -> None:
        """Makes namespaces with similar names of 120 characters."""
        chance = random.Random(0)
        core = "".join(chance.choices("abcdefgh", k=104))
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(partial(self._look_alike, core), range(LOOK_ALIKES)))

    def _look_alike(self, core: str, number: int) -> None:
        name = list(core)
        for place in random.Random(number).sample(range(len(core)), 6):
            name[place] = "x"
        response = pb.Response(tokens=i32([1]))
        name_of = f"attack-{''.join(name)}{number:05d}"
        self._ingest(pb.IngestRequest(namespace=name_of, prompt=i32([1]), responses=[response]))

    def nested(self, prompts: int) -> None:
        """Ingests prompts of which each continues the one before."""
        for number in range(1, prompts + 1):
            prompt = np.ones(number * NESTED_TOKENS, "<i4").tobytes()
            response = pb.Response(tokens=i32([2] * 20))
            self._ingest(pb.IngestRequest(namespace="attack", prompt=prompt, responses=[response]))

    def _ingest(self, request: pb.IngestRequest) -> None:
        self._stub.Ingest(request, timeout=120, metadata=metadata(ATTACKER))

    # Attacks

    def unread(self, end: float, path: str, request: bytes, calls: int, window: int = 0) -> None:
        """Makes calls on a connection and reads no answers. If the server ends the connection, begins again."""
        while time.monotonic() < end:
            with self._peer(window) as peer:
                for number in range(calls):
                    peer.call(2 * number + 1, path, message(request), ATTACKER)
                while time.monotonic() < end and not peer.closed:
                    time.sleep(0.05)

    def dropped(self, end: float, path: str, request: bytes, connections: int, calls: int) -> None:
        """Makes calls on some connections, ends these 0.3 s later, and begins again."""
        while time.monotonic() < end:
            with ExitStack() as stack:
                for _ in range(connections):
                    peer = stack.enter_context(self._peer())
                    for number in range(calls):
                        peer.call(2 * number + 1, path, message(request), ATTACKER)
                time.sleep(0.3)

    def unfinished(self, end: float, path: str, connections: int) -> None:
        """Sends requests without their last byte, each on a connection. If one is refused, begins again."""
        whole = message(bytes(UNFINISHED))[:-1]

        def send(_: int) -> None:
            while time.monotonic() < end:
                with self._peer() as peer:
                    peer.call(1, path, None, ATTACKER)
                    peer.send(1, whole, seconds=end - time.monotonic())
                    while time.monotonic() < end and 1 not in peer.ended and not peer.closed:
                        time.sleep(0.05)

        with ThreadPoolExecutor(connections) as threads:
            list(threads.map(send, range(connections)))

    def headers(self, end: float, path: str, calls: int) -> None:
        """Begins calls and sends no message; a new call for each that ends."""
        while time.monotonic() < end:
            with self._peer() as peer:
                number = 0
                while time.monotonic() < end and not peer.closed and number < 100_000:
                    for _ in range(min(100, calls - (number - len(peer.ended)))):
                        peer.call(2 * number + 1, path, None, ATTACKER)
                        number += 1
                    time.sleep(0.05)

    def inspects(self, end: float, threads: int) -> None:
        """Asks for names like one of many."""

        def ask(number: int) -> None:
            request = pb.InspectRequest(namespace=f"attack-{number}" + "abcdefgh" * 12)
            while time.monotonic() < end:
                with suppress(grpc.RpcError):
                    self._stub.Inspect(request, timeout=60, metadata=metadata(ATTACKER))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(ask, range(threads)))

    def predictions(self, end: float) -> None:
        """Asks for many lengths in messages of 16 MiB."""
        problems = [pb.ExpectedResponse(prompt=i32([1, n, *range(1000)])) for n in range(4000)]
        request = pb.PredictLengthsRequest(namespace="attack", problems=problems)
        while time.monotonic() < end:
            with suppress(grpc.RpcError):
                self._stub.PredictLengths(request, timeout=60, metadata=metadata(ATTACKER))

    def without_token(self, end: float) -> None:
        """Sends updates of 60 MiB without a token, three at a time, on connections that stay."""
        update = self._channel.unary_unary(UPDATE, None, None)

        def send(_: int) -> None:
            while time.monotonic() < end:
                with suppress(grpc.RpcError):
                    update(bytes(UNFINISHED), timeout=60)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(send, range(3)))

    def nested_opens(self, end: float, prompts: int) -> None:
        """Opens sessions that continue all nested prompts."""
        prompt = np.ones(prompts * NESTED_TOKENS + 50, "<i4").tobytes()
        while time.monotonic() < end:
            stream = Stream(self._endpoint, metadata(ATTACKER))
            opens = [pb.OpenSession(session=i, namespace="attack", prompt=prompt) for i in range(1, 5)]
            with suppress(grpc.RpcError):
                stream.ask(pb.Step(), opens)
            stream.end()

    @contextmanager
    def _peer(self, window: int = 65_535) -> Iterator[RawHttp2]:
        peer = RawHttp2(self._endpoint, window=window)
        try:
            with suppress(OSError):
                yield peer
        finally:
            peer.close()


class Case(NamedTuple):
    """An attack.

    Attributes:
        name: name in the table.
        attack: runs in one process for each number of `processes`.
        before: what it needs.
        processes: how many attack at the same time.
        memory: the server's `--memory`, in MiB.

    """

    name: str
    attack: Callable[..., None]
    before: Callable[[Attack], None] | None = None
    processes: int = 1
    memory: int = 256

    @property
    def allowed(self) -> int:
        """The memory that the server may use, in bytes: docs/run-a-server.md."""
        return self.memory * MIB * 115 // 100 + 512 * MIB


HISTORY = pb.HistoryRequest(namespace="attack", prompt=i32([1])).SerializeToString()
INSPECT = pb.InspectRequest(namespace="attack").SerializeToString()
EXPORT = pb.ExportRequest(namespaces="attack").SerializeToString()
SHORT = pb.HistoryRequest(namespace="attack", prompt=i32([2])).SerializeToString()
LISTS = b"\x3a\x00"  # all services, by reflection
CASES = [
    Case("watch health 64 times with a window of 0", partial(Attack.unread, path=WATCH, request=b"", calls=64)),
    Case(
        "ask for a history of 48 MiB 60 times, read nothing",
        partial(Attack.unread, path=f"{SERVICE}/History", request=HISTORY, calls=60),
        Attack.large_history,
    ),
    Case(
        "the same on 3 connections, which read 64 KiB",
        partial(Attack.unread, path=f"{SERVICE}/History", request=HISTORY, calls=20, window=65_535),
        Attack.large_history,
        processes=3,
    ),
    Case("ask for a history of 240 KiB 1,000 times, read nothing",
         partial(Attack.unread, path=f"{SERVICE}/History", request=SHORT, calls=1000), Attack.short_history),
    Case("ask for a history of 240 KiB 1,000 times, drop the connection 0.3 s later, again and again",
         partial(Attack.dropped, path=f"{SERVICE}/History", request=SHORT, connections=1, calls=1000),
         Attack.short_history),
    Case("the same on 10 connections at a time, 100 calls on each",
         partial(Attack.dropped, path=f"{SERVICE}/History", request=SHORT, connections=10, calls=100),
         Attack.short_history),
    Case("list the health 1,000 times, read nothing",
         partial(Attack.unread, path="/grpc.health.v1.Health/List", request=b"", calls=1000)),
    Case("export twice, read nothing",
         partial(Attack.unread, path=f"{SERVICE}/Export", request=EXPORT, calls=2), Attack.large_history),
    Case("inspect 500 times, read nothing",
         partial(Attack.unread, path=f"{SERVICE}/Inspect", request=INSPECT, calls=500)),
    Case("reflect 60 times, read nothing", partial(Attack.unread, path=REFLECTION, request=LISTS, calls=60)),
    Case("30 ingests of 60 MiB without their last byte",
         partial(Attack.unfinished, path=f"{SERVICE}/Ingest", connections=30)),
    Case("10 Draft streams with a message of 60 MiB without its last byte",
         partial(Attack.unfinished, path=f"{SERVICE}/Draft", connections=10)),
    Case("10 health checks of 60 MiB without their last byte",
         partial(Attack.unfinished, path="/grpc.health.v1.Health/Check", connections=10)),
    Case("1,000 ingests that send headers alone", partial(Attack.headers, path=f"{SERVICE}/Ingest", calls=1000)),
    Case("1,000 histories that send headers alone", partial(Attack.headers, path=f"{SERVICE}/History", calls=1000)),
    Case("updates of 60 MiB without a token, 3 at a time", Attack.without_token),
    Case("8 updates that send headers alone", partial(Attack.headers, path=UPDATE, calls=8)),
    Case(f"inspect among {LOOK_ALIKES:,} similar names, 16 at a time", partial(Attack.inspects, threads=16),
         Attack.look_alikes),
    Case("predict 4,000 lengths in messages of 16 MiB", Attack.predictions),
    Case("open sessions that continue 400 nested prompts",
         partial(Attack.nested_opens, prompts=400), partial(Attack.nested, prompts=400)),
    Case("the same with 1,000 nested prompts, of up to 500,000 tokens, in messages of 8 MB",
         partial(Attack.nested_opens, prompts=1000), partial(Attack.nested, prompts=1000), memory=2048),
]  # fmt: skip


class Times(NamedTuple):
    """Milliseconds of each step and history."""

    steps: list[float]
    histories: list[float]

    def p99(self) -> list[float]:
        """Returns the 99th percentiles."""
        return [float(np.quantile(taken, 0.99)) for taken in self]


class Memory:
    """The peak of the resident memory of a process from now on."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")

    def peak(self) -> int:
        """Returns it in bytes."""
        status = (self._folder / "status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10


def turn(worker: Worker, caller: Child[Caller], times: Times) -> None:
    """Measures for one turn."""
    caller.start(Caller.until, time.monotonic() + TURN)
    times.steps.extend(worker.until(seconds_over(TURN)))
    times.histories.extend(caller.wait())


def measure(case: Case, turns: int) -> str:
    """Returns a row of the table."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = folder / "tokens.toml"
        tokens.write_text(TOKENS)
        server: DraftServer = stack.enter_context(
            running(folder / "data", folder / "log", "--memory", f"{case.memory}MiB", "--tokens", str(tokens))
        )
        caller = Child(Caller, server.endpoint)
        attackers = [Child(Attack, server.endpoint) for _ in range(case.processes)]
        stack.callback(caller.end)
        for attacker in attackers:
            stack.callback(attacker.end)
        worker = Worker(server.endpoint, metadata(WORKER))
        if case.before is not None:
            attackers[0].call(case.before)
        quiet, attacked = Times([], []), Times([], [])
        turn(worker, caller, Times([], []))  # unmeasured: caches are cold
        memory = Memory(server.pid)
        for _ in range(turns):
            turn(worker, caller, quiet)
            end = time.monotonic() + TURN
            for attacker in attackers:
                attacker.start(case.attack, end)
            turn(worker, caller, attacked)
            for attacker in attackers:
                attacker.wait()
        peak = memory.peak()
        worker.end()
    cells: list[Any] = [case.name]
    for before, after in zip(quiet.p99(), attacked.p99(), strict=True):
        cells += [f"{before:.1f}, {after:.1f}", f"{after / before:.1f}"]
    return line([*cells, str(len(attacked.steps)), f"{peak / MIB:,.0f} of {case.allowed / MIB:,.0f}"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the attacks, from 0")
    parser.add_argument("--turns", type=int, default=3, help="turns with and without each attack (default: 3)")
    options = parser.parse_args()
    columns = [name for what in ("step", "History") for name in (f"{what} p99, ms: without, with", "ratio")]
    print(heading(["attack", *columns, "steps", "peak of allowed MiB"]), end="", flush=True)
    for number, case in enumerate(CASES):
        if options.only is None or number in options.only:
            print(measure(case, options.turns), end="", flush=True)


if __name__ == "__main__":
    main()
