"""Sends problems to the shards of a running service, each to its owner."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from histospec.server.commands.lines import Stored
from histospec.server.commands.shards import Shards, ShardsError
from histospec.server.stores.interface import Problem, Record
from histospec.server.stores.records import to_message
from histospec.v1 import draft_pb2 as pb

SECONDS = 120.0  # timeout of one request
PIECE = 512 << 10  # bytes of a request, unless one response alone is larger
EACH = 256  # minimum bytes that a problem or a response counts for, besides its arrays
PARTS = 16  # parts of one problem
WAITING = 4  # unanswered requests of one shard


def held(shards: Shards, pattern: str) -> set[str]:
    """Returns the namespaces that match and have data on any shard. Raises ShardsError."""
    found = set()
    for name in shards.names:
        call, start = shards.stream(name, pb.ExportRequest(namespaces=pattern))
        call.cancel()
        found |= {one.namespace for one in start.namespaces}
    return found


class Importing:
    """Running imports. As a context manager, waits on a normal exit until all have arrived.

    Raises ShardsError if a shard does not accept a request in time.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._lanes = {name: _Lane(shards, name) for name in shards.names}
        self._learned: set[str] = set()

    def __enter__(self) -> "Importing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes.values():
            lane.end(cancel=error is not None)

    @property
    def responses(self) -> int:
        """Responses added so far: those that the shards lacked."""
        return sum(lane.responses for lane in self._lanes.values())

    @property
    def tokens(self) -> int:
        """Tokens of the added responses."""
        return sum(lane.tokens for lane in self._lanes.values())

    def add(self, stored: Stored) -> None:
        """Sends a problem to its owner, soon. Waits while many requests are unanswered. Raises ShardsError."""
        namespace = stored.problem.namespace
        if stored.estimator and namespace not in self._learned:
            self._learned.add(namespace)
            for lane in self._lanes.values():
                lane.send(pb.ImportRequest(namespace=namespace, estimator=stored.estimator))
        self._lanes[self._shards.owner(stored.problem)].add(stored.problem, stored.records)

    def land(self) -> None:
        """Waits until all requests are answered. Raises ShardsError."""
        for lane in self._lanes.values():
            lane.land()


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
        self.responses = self.tokens = 0

    def add(self, problem: Problem, records: Sequence[Record]) -> None:
        # A shard compares each part with all its responses of the problem, so use few parts for a large problem.
        room = min(self._most // 2, max(PIECE, sum(map(_weight, records)) // PARTS))
        for part in parts(records, room, self._batch):
            size = sum(map(_weight, part)) + len(problem.prompt) + EACH
            full = self._size + size > PIECE or len(self._request.problems) >= self._batch
            if self._size and (full or self._request.namespace != problem.namespace):
                self._flush()
            self._request.namespace = problem.namespace
            held = self._request.problems.add(prompt=problem.prompt, problem=problem.name)
            held.responses.extend(map(to_message, part))
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

    def land(self) -> None:
        self._flush()
        self._settle(0)

    def end(self, cancel: bool) -> None:
        self._thread.shutdown(wait=not cancel, cancel_futures=cancel)


def parts(records: Sequence[Record], room: int, most: int) -> Iterator[list[Record]]:
    """Splits the responses of a problem into parts of `room` bytes, or one response, and at most `most` responses.

    Keeps equal responses together if they fit: a shard adds only missing responses, and would take a second equal one
    for a retry of the first.
    """
    if sum(map(_weight, records)) <= room and len(records) <= most:
        yield list(records)
        return
    part: list[Record] = []
    size = 0
    for same in _equal(records, most):
        more = sum(map(_weight, same))
        if part and (size + more > room or len(part) + len(same) > most):
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
