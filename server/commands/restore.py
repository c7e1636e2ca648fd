"""`histospec restore SOURCE --to ENDPOINT`: loads a snapshot into a running service, each problem into its owner."""

import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType

from histospec.replay.recordings import RecordingError
from histospec.server.arguments import ArgumentParser
from histospec.server.commands import connection
from histospec.server.commands.lines import Stored, decoded, namespaces, summary
from histospec.server.commands.shards import Shards, ShardsError, add_options
from histospec.server.commands.snapshot_target import snapshot_target
from histospec.server.errors import ConfigError, HistoSpecError
from histospec.server.stores.interface import Problem, Record
from histospec.server.stores.records import to_message
from histospec.v1 import draft_pb2 as pb

SECONDS = 120.0  # timeout of one request
PIECE = 512 << 10  # bytes of a request, unless one response alone is larger
EACH = 256  # minimum bytes that a problem or a response counts for, besides its arrays
PARTS = 16  # parts of one problem
WAITING = 4  # unanswered requests of one shard


class RestoreError(HistoSpecError):
    """A snapshot could not be restored completely."""


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Raises HistoSpecError."""
    parser = ArgumentParser(
        prog="histospec restore", description="Load a snapshot into a running service.", allow_abbrev=False
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a snapshot of `histospec snapshot`: a file, - for standard input, or a URL; from a folder or "
        "s3://BUCKET/PREFIX, the newest one",
    )
    help_ = f"the shards of the service: {connection.SERVICE}"
    parser.add_argument("--to", dest="endpoint", metavar="ENDPOINT", required=True, help=help_)
    parser.add_argument("--merge", action="store_true", help="add missing responses to namespaces that exist")
    add_options(parser)
    asked = parser.parse_args(list(argv))
    with _snapshot(asked.source, asked.namespace) as (name, named, problems):
        try:
            with Shards(connection.caller(asked.endpoint, asked), asked.shards) as shards:
                existing = set() if asked.merge else _namespaces(shards, asked.namespace)
                _refuse(existing & named, asked.endpoint)
                with ShardImports(shards) as imports:
                    counts = _restore(imports, problems, existing, asked.endpoint)
        except ShardsError as error:
            raise RestoreError(f"{error}; earlier ones are restored: run again with --merge to add the rest") from None
    sys.stdout.write(f"{name}: {summary(counts)}\n")
    return 0


@contextmanager
def _snapshot(source: str, pattern: str) -> Iterator[tuple[str, set[str], Iterator[Stored]]]:
    """Yields the name of a snapshot, its namespaces (none if it can be read only once), and its problems.

    Checks the whole file first.
    """
    target = snapshot_target(source)
    name = target.name or target.newest()
    with target.opened(name) as file:
        named = set()
        if file.seekable():
            named = namespaces(file, pattern)
            file.seek(0)
        yield target.path(name), named, decoded(file, pattern)


def _namespaces(shards: Shards, pattern: str) -> set[str]:
    """Returns the namespaces that match and have data on any shard. Raises ShardsError."""
    found = set()
    for name in shards.names:
        call, start = shards.stream(name, pb.ExportRequest(namespaces=pattern))
        call.cancel()
        found |= {one.namespace for one in start.namespaces}
    return found


def _restore(imports: "ShardImports", problems: Iterator[Stored], existing: set[str], endpoint: str) -> "Counter[str]":
    """Adds the problems, and refuses those of existing namespaces. Returns what was added."""
    sent = 0
    try:
        for stored in problems:
            _refuse(existing & {stored.problem.namespace}, endpoint)
            imports.add(stored)
            sent += 1
    except (ConfigError, RecordingError) as error:  # in a source that can be read only once
        if not sent:
            raise
        added = summary(imports.finish(sent))
        raise type(error)(f"{error} (restored before it: {added}; run again with --merge to add the rest)") from None
    return imports.finish(sent)


def _refuse(existing: set[str], endpoint: str) -> None:
    if existing:
        raise ConfigError(
            f"the store of {endpoint} already has namespace {min(existing)!r}: exclude it with --namespace, or give "
            "--merge to add missing responses; a drop would delete its history from this store, also for every other "
            "service that uses the store"
        )


class ShardImports:
    """Imports that run on the shards of a service. As a context manager, waits on a normal exit until all have arrived.

    Methods raise ShardsError if a shard does not accept a request in time.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._lanes = {name: _Lane(shards, name) for name in shards.names}
        self._learned: set[str] = set()

    def __enter__(self) -> "ShardImports":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes.values():
            lane.end(cancel=error is not None)

    def add(self, stored: Stored) -> None:
        """Sends a problem to its owner, soon. Waits while many requests are unanswered."""
        namespace = stored.problem.namespace
        if stored.estimator and namespace not in self._learned:
            self._learned.add(namespace)
            for lane in self._lanes.values():
                lane.send(pb.ImportRequest(namespace=namespace, estimator=stored.estimator))
        self._lanes[self._shards.owner(stored.problem)].add(stored.problem, stored.records)

    def finish(self, problems: int) -> "Counter[str]":
        """Waits until all requests are answered.

        Returns `problems`, the added responses and tokens, and the responses that are too old to keep.
        """
        counts = Counter(problems=problems)
        for lane in self._lanes.values():
            lane.finish()
            counts.update(responses=lane.responses, tokens=lane.tokens, too_old=lane.too_old)
        return counts


class _Lane:
    """Requests for one shard, in order: sends one at a time while the next ones are built."""

    def __init__(self, shards: Shards, name: str) -> None:
        self._shards = shards
        self._name = name
        limits = shards.call(name, "Inspect", pb.InspectRequest(namespace="any"), SECONDS).limits
        self._most = limits.message_bytes
        self._batch = limits.batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="import")
        self._waiting: deque[Future[pb.ImportResponse]] = deque()
        self._request = pb.ImportRequest()
        self._size = 0
        self.responses = self.tokens = self.too_old = 0

    def add(self, problem: Problem, records: Sequence[Record]) -> None:
        # A shard compares each part with all its responses of the problem, so use few parts for a large problem.
        most = min(self._most // 2, max(PIECE, sum(map(_weight, records)) // PARTS))
        for part in parts(records, most, self._batch):
            size = sum(map(_weight, part)) + len(problem.prompt) + EACH
            full = self._size + size > PIECE or len(self._request.problems) >= self._batch
            if self._size and (full or self._request.namespace != problem.namespace):
                self._flush()
            self._request.namespace = problem.namespace
            message = self._request.problems.add(prompt=problem.prompt, problem=problem.name)
            message.responses.extend(map(to_message, part))
            self._size += size

    def _flush(self) -> None:
        if self._size:
            request, self._request, self._size = self._request, pb.ImportRequest(), 0
            self._submit(request)

    def send(self, request: pb.ImportRequest) -> None:
        """Sends a request after all earlier ones."""
        self._flush()
        self._submit(request)

    def _submit(self, request: pb.ImportRequest) -> None:
        if (size := request.ByteSize()) > self._most:
            raise ShardsError(
                f"Import on {self._name}: a response of namespace {request.namespace!r} makes a message of {size} "
                f"bytes, more than the limit of {self._most}; start the server with a larger --max-message"
            )
        self._settle(WAITING - 1)
        self._waiting.append(self._thread.submit(self._shards.call, self._name, "Import", request, SECONDS))

    def _settle(self, most: int) -> None:
        while len(self._waiting) > most:
            answer = self._waiting.popleft().result()
            self.responses += answer.responses
            self.tokens += answer.tokens
            self.too_old += answer.too_old

    def finish(self) -> None:
        self._flush()
        self._settle(0)

    def end(self, cancel: bool) -> None:
        self._thread.shutdown(wait=not cancel, cancel_futures=cancel)


def parts(records: Sequence[Record], most_bytes: int, most: int) -> Iterator[list[Record]]:
    """Splits the responses of a problem into parts of at most `most` responses and `most_bytes`, or one response.

    Keeps equal responses together if they fit: a shard adds only missing responses, and would take a second equal one
    for a retry of the first.
    """
    if sum(map(_weight, records)) <= most_bytes and len(records) <= most:
        yield list(records)
        return
    part: list[Record] = []
    size = 0
    for same in _equal(records, most):
        more = sum(map(_weight, same))
        if part and (size + more > most_bytes or len(part) + len(same) > most):
            yield part
            part, size = [], 0
        part += same
        size += more
    yield part


def _weight(record: Record) -> int:
    return record.size + EACH


def _equal(records: Sequence[Record], most: int) -> Iterator[list[Record]]:
    """Yields groups of equal records, ordered by the first record of each group."""
    found: dict[Record, list[Record]] = {}
    for record in records:
        found.setdefault(record, []).append(record)
    for same in found.values():
        for start in range(0, len(same), most):
            yield same[start : start + most]
