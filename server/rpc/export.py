"""Export: streams the contents of some namespaces of the store at the pace of the reader.

A thread reads and encodes one piece, and the event loop writes it. When gRPC has taken the piece, the thread reads the
next one. So an export holds only one piece and its problem, however slow the reader is, and other streams step between
two pieces.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import grpc.aio
import structlog

from histospec.server.errors import Unavailable
from histospec.server.history.history import History
from histospec.server.rpc import wire
from histospec.server.rpc.answering import Answering
from histospec.server.security.access import Permit
from histospec.server.stores.interface import Reader
from histospec.server.stores.records import to_message
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

PIECE = 256 << 10  # bytes of a message, unless one response alone is larger
EACH = 256  # minimum bytes that a problem or a response counts for: reading it costs as much as copying these
MOST, MOST_EACH = 4, 2  # concurrent exports, in all and of one token: each reads the store as fast as its reader


class Piece(NamedTuple):
    """One message of an export."""

    encoded: bytes
    problems: int
    responses: int


class Exports:
    """The exports of one shard. Used only on the event loop."""

    def __init__(self, history: History, answering: Answering) -> None:
        self._history = history
        self._answering = answering
        self._running: Counter[str] = Counter()  # by token

    async def run(
        self,
        request: pb.ExportRequest,
        permit: Permit,
        context: "grpc.aio.ServicerContext[Any, Any]",
        shard: str,
        draining: Callable[[], bool],
    ) -> None:
        """Runs an export to its end.

        Raises InvalidRequest, PermissionDenied, Unauthenticated, Unavailable and StoreError.
        """
        pattern = wire.namespace("namespaces", request.namespaces or "*")
        permit.require("admin", pattern)
        if self._running.total() >= MOST:
            raise Unavailable(f"{MOST} exports are running, the limit of this shard; retry when one has ended")
        if permit.digest and self._running[permit.digest] >= MOST_EACH:
            raise Unavailable(f"{MOST_EACH} exports of this token are running, the limit; retry when one has ended")
        self._running[permit.digest] += 1
        peer = context.peer()  # read now: gRPC frees the call behind the context when the caller leaves
        end, done = pb.ExportEnd(), False
        try:
            await self._history.read(lambda store: store.complete())
            newest = await self._history.read(lambda store: store.newest_epochs())
            # `require` compared two patterns as text; check each namespace that matches, too.
            names = [n for n in sorted(newest) if fnmatchcase(n, pattern) and permit.allows("admin", n)]
            held = [pb.StoredNamespace(namespace=name, newest_epoch=newest[name]) for name in names]
            start = pb.ExportStart(shard=shard, shared=self._history.shared, namespaces=held)
            await self._answering.write(context, pb.ExportResponse(start=start).SerializeToString())
            for name in names:
                async for piece in self._pieces(name):
                    permit.require("admin", name)
                    if draining():
                        raise Unavailable("the server is draining; retry when it is back")
                    await self._answering.write(context, piece.encoded)
                    end.problems += piece.problems
                    end.responses += piece.responses
            end.damaged = await self._history.read(lambda store: store.damaged_responses)
            await self._answering.write(context, pb.ExportResponse(end=end).SerializeToString())
            done = True
        finally:
            self._running[permit.digest] -= 1
            log.info(
                "exported" if done else "an export ended early",
                peer=peer,
                namespaces=pattern,
                problems=end.problems,
                responses=end.responses,
                damaged=end.damaged,
            )

    async def _pieces(self, namespace: str) -> AsyncIterator[Piece]:
        found = await self._history.read(lambda store: pieces(store, namespace))
        while (piece := await self._history.read(lambda _: next(found, None))) is not None:
            yield piece


def pieces(store: Reader, namespace: str) -> Iterator[Piece]:
    """Yields the messages of a namespace, at least one, which has its estimator. Reads the store as it goes."""
    message = pb.ExportResponse(namespace=namespace, estimator=store.estimator(namespace) or b"")
    size = problems = responses = 0
    for problem, records in store.problems(namespace):
        part: pb.StoredProblem | None = None
        for number, record in enumerate(records):
            if size >= PIECE:
                yield Piece(message.SerializeToString(), problems, responses)
                message, part = pb.ExportResponse(namespace=namespace), None
                size = problems = responses = 0
            if part is None:
                part = message.problems.add(prompt=problem.prompt, problem=problem.name, continued=number > 0)
                problems += not number
                size += len(problem.prompt) + EACH
            part.responses.append(to_message(record))
            responses += 1
            size += record.size + EACH
    yield Piece(message.SerializeToString(), problems, responses)
