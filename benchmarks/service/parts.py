"""Measures which parts of a step take longer after a pause, by timestamps in the worker and in the server.

`python -m benchmarks.service.parts`: a worker makes turns of steps after pauses of 30 ms and without, as in `waits.py`.
Prints a Markdown table: microseconds, medians over the turns, and how many times as long as without a pause.
"""

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.service.messages_worker import WARM, Batch, ingested
from benchmarks.tables import heading, line
from examples.draft_server import running
from histospec.client import DraftClient

PARTS = (
    "client: check the arguments, build the message",
    "client: hand it to gRPC",
    "gRPC and the kernel, to the server's loop",
    "server: decode and check",
    "engine",
    "server: build the answer",
    "gRPC and the kernel, to the client's loop",
    "client: check the answer, build the drafts",
    "all",
)
Stamps = NDArray[np.float64]
"""Seconds on the monotonic clock, which all processes share."""


def serve(path: Path, flags: Sequence[str]) -> int:
    """Runs a server. At its end it writes float64[steps, 4].

    These are when a message arrived, when the engine was called, when it returned, and when the answer was built.
    """
    from histospec.server.cli import main

    names = ("answers", "interceptors", "slices")
    answers, interceptors, slices = (importlib.import_module(f"histospec.server.rpc.{name}") for name in names)
    found: list[list[float]] = []
    arrived, engine = 0.0, list[float]()
    unless_large, call, send = interceptors.unless_large, slices._call, answers.Answers._send

    def arriving(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        decoding = unless_large(decode)

        def decoded(data: bytes) -> Any:
            nonlocal arrived
            arrived = time.monotonic()
            return decoding(data)

        return decoded

    def calling(*arguments: Any) -> Any:
        started = time.monotonic()
        result = call(*arguments)
        if len(arguments[1].sessions):  # no rehearsal
            engine[:] = started, time.monotonic()
        return result

    async def sending(self: Any, encoded: bytes) -> None:
        if engine:
            found.append([arrived, *engine, time.monotonic()])
            engine.clear()
        await send(self, encoded)

    for owner, attribute, wrapper in (
        (interceptors, "unless_large", arriving),
        (slices, "_call", calling),
        (answers.Answers, "_send", sending),
    ):
        setattr(owner, attribute, wrapper)
    try:
        return main(["serve", *flags])
    finally:
        with path.open("wb") as file:
            np.save(file, np.array(found))


@contextmanager
def stamped(client: DraftClient) -> Iterator[list[list[float]]]:
    """Yields what becomes a row for each step: begun, built, handed over, the answer arrived, the drafts are there."""
    from histospec.client.core.stream_state import StreamState

    found: list[list[float]] = []
    step, build, send, parse = client.step, client._core.send, client.send, StreamState.parse
    row = [0.0] * 5

    def noted(place: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            row[place] = time.monotonic()
            return result

        return noting

    def stepping(*arguments: Any) -> Any:
        row[0] = time.monotonic()
        drafts = step(*arguments)
        found.append([*row[:4], time.monotonic()])
        return drafts

    def parsing(self: StreamState, text: bytes) -> Any:
        row[3] = time.monotonic()
        return parse(self, text)

    patched: Any = client
    patched._core.send, patched.send, patched.step = noted(1, build), noted(2, send), stepping
    StreamState.parse = parsing  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StreamState.parse = parse  # type: ignore[method-assign]


def parts(client: Stamps, server: Stamps) -> Stamps:
    """Returns float64[steps, 9], microseconds of each of PARTS in each step, from the stamps of both processes."""
    begun, built, handed, returned, done = client.T
    arrived, called, drafted, answered = server.T
    times = (begun, built, handed, arrived, called, drafted, answered, returned, done)
    spans = np.diff(np.array(times), axis=0).T * 1e6
    return np.column_stack([spans, spans.sum(axis=1)])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256], help="sessions of a step (1 64 256)")
    parser.add_argument("--turns", type=int, default=5, help="turns with pauses and without (5)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a turn (100)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    args = parser.parse_args()
    batches, turns, steps = ([1, 4], 1, 10) if args.quick else (args.batches, args.turns, args.steps)
    rng = np.random.default_rng(0)
    measured: dict[tuple[int, float], list[slice]] = {}  # by sessions and pause: the steps of each turn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = "-m", "benchmarks.service.parts", "serve", str(folder / "stamps")
        with (
            running(folder / "data", folder / "log", program=program) as server,
            DraftClient(server.endpoint, "parts", deadline=1.0) as client,
        ):
            texts = ingested(client, rng)
            with stamped(client) as stamps:
                for size in batches:
                    batch = Batch(client, texts, size)
                    for pause in (0.03, 0.0) * turns:
                        for _ in range(WARM + steps):
                            batch.step(pause and rng.gamma(2500, pause / 2500))
                        measured.setdefault((size, pause), []).append(slice(len(stamps) - steps, len(stamps)))
        found = parts(np.array(stamps), np.load(folder / "stamps"))
    head = ["part", *(cell for size in batches for cell in (f"{size} sessions, 30 ms", "no pause", "times"))]
    print(heading(head), end="")
    for part, column in zip(PARTS, found.T, strict=True):
        cells = []
        for size in batches:
            middles = ([np.median(column[turn]) for turn in measured[size, pause]] for pause in (0.03, 0.0))
            after, none = map(np.median, middles)
            cells += [f"{after:.0f}", f"{none:.0f}", f"{after / none:.1f}"]
        print(line([part, *cells]), end="")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(Path(sys.argv[2]), sys.argv[4:]))
    main()
