"""Measures the cost of scrapes on a shard with thousands of namespaces: CPU time, bytes, series, and a worker's steps.

A worker steps 8 sessions every 10 ms. In turns, there are no scrapes, one scrape of /metrics per second, and one of
/status per second. The CPU time of an answer is that of the whole server process, without a worker. Prints two Markdown
tables.
"""

import argparse
import gzip
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import grpc
import numpy as np

from benchmarks.process import Child, cpu_seconds
from benchmarks.service.pressure import Stream, Worker, i32, opening, seconds_over, step
from benchmarks.tables import heading, line
from examples.draft_server import DraftServer, running
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc

PAGES = ("/metrics", "/status")
# As Prometheus asks.
HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "Accept-Encoding": "gzip"}
EVERY = 1.0  # seconds between two scrapes
TOGETHER = 256  # ingests
BURST = 20  # how many answers the CPU time is measured for
TURNS = 4
LATE = 20.0  # milliseconds: the default deadline of a step


def get(http: str, page: str) -> bytes:
    """Returns an answer as sent over the network."""
    request = urllib.request.Request(f"http://{http}{page}", headers=HEADERS)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
    return body


class Scraper:
    """A scraper in a child process."""

    def __init__(self, http: str) -> None:
        self._http = http

    def scrapes(self, page: str, seconds: float) -> None:
        """Scrapes once per second."""
        over = seconds_over(seconds)
        while not over():
            next_one = time.monotonic() + EVERY
            get(self._http, page)
            time.sleep(max(0.0, next_one - time.monotonic()))


def fill(endpoint: str, namespaces: int) -> None:
    """Makes namespaces with steps, so that every series exists and has values above 0."""
    stub, stream = pb_grpc.DraftServiceStub(grpc.insecure_channel(endpoint)), Stream(endpoint)
    text = np.arange(10, 40)
    names = [f"qwen3-8b-math-{number:04}" for number in range(namespaces)]
    responses = [pb.Response(tokens=i32(text))]
    ingests = (pb.IngestRequest(namespace=name, prompt=i32([1]), responses=responses) for name in names)
    for some in iter(lambda: list(islice(ingests, TOGETHER)), []):  # they share a sync
        for sent in [stub.Ingest.future(ingest) for ingest in some]:
            sent.result()
    for number, name in enumerate(names):
        session = number + 1
        stream.ask(opens=[opening(session, [1], name)], step=step([session], 0, text[None, :4]))
        stream.send(closes=[pb.CloseSession(session=session)])  # a close has no answer
    stream.end()


def answer_cost(server: DraftServer, page: str) -> str:
    """Returns a row: size and cost of one answer."""
    body = get(server.http, page)
    plain = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    series = sum(not row.startswith("#") for row in plain.decode().splitlines()) if page == "/metrics" else None
    started = time.monotonic()
    before = cpu_seconds(server.pid)
    for _ in range(BURST):  # one per second, because the server computes no more
        get(server.http, page)
    busy, seconds = cpu_seconds(server.pid) - before, time.monotonic() - started
    before = cpu_seconds(server.pid)
    time.sleep(seconds)
    idle = cpu_seconds(server.pid) - before
    shown = "-" if series is None else f"{series:,}"
    return line([page, f"{1e3 * (busy - idle) / BURST:.1f}", f"{len(plain):,}", f"{len(body):,}", shown])


def steps(server: DraftServer, scraper: Child[Scraper], seconds: float) -> list[str]:
    """Yields rows: the latency of the worker's steps, in turns with and without a scraper."""
    worker = Worker(server.endpoint)
    taken: dict[str, list[float]] = {"nothing": [], **{page: [] for page in PAGES}}
    for _ in range(TURNS):
        for page, some in taken.items():
            asks: Callable[[Scraper], None] = (
                partial(Scraper.scrapes, page=page, seconds=seconds) if page in PAGES else _nothing
            )
            scraper.start(asks)
            some += worker.until(seconds_over(seconds))
            scraper.wait()
    worker.end()
    rows = []
    for page, some in taken.items():
        half, most, longest = np.quantile(some, [0.5, 0.99, 1])
        late = sum(milliseconds > LATE for milliseconds in some)
        rows.append(line([page, f"{half:.2f}", f"{most:.2f}", f"{longest:.1f}", f"{late} of {len(some)}"]))
    return rows


def _nothing(scraper: Scraper) -> None:
    pass


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespaces", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    parser.add_argument("--only", choices=("cost", "steps"), help="one of the two tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running(Path(name, "data"), Path(name, "log")) as server:
        fill(server.endpoint, options.namespaces)
        scraper = Child(Scraper, server.http)
        if options.only != "steps":
            print(heading(["answer", "CPU, ms", "bytes", "bytes as sent", "series"]), end="")
            for page in PAGES:
                print(answer_cost(server, page), end="", flush=True)
        if options.only != "cost":
            head = ["asked each second", "step p50, ms", "p99, ms", "longest, ms", f"later than {LATE:.0f} ms"]
            print(f"\n{heading(head)}", end="")
            print("".join(steps(server, scraper, options.seconds)), end="")
            longest = server.total("histospec_engine_lock_longest_seconds")
            print(f"\nThe engine's lock was held for at most {1e3 * longest:.1f} ms of CPU.")
        scraper.end()


if __name__ == "__main__":
    main()
