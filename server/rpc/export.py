"""Export: streams what the store holds of some namespaces, at the pace of the reader.

A thread reads and encodes one piece; the event loop writes it; the thread reads the next piece when gRPC has taken this
one. So an export holds one piece and the problem that it is part of, however slow its reader is, and other streams step
between two pieces.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import grpc.aio
import structlog

from histospec.server.errors import Unavailable
from histospec.server.history.history import History
from histospec.server.rpc import wire
from histospec.server.security.access import Permit
from histospec.server.stores.interface import Reader
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

PIECE = 256 << 10  # bytes of a message, or one response that is larger
EACH = 256  # bytes that a problem or a response counts for at least: reading it costs as much as copying these
MOST = 2  # exports at a time: each reads the store as fast as its reader takes it


class Piece(NamedTuple):
    """One message of an export."""

    encoded: bytes
    problems: int
    responses: int


class Exports:
    """The exports of one shard. Lives on the event loop."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._running = 0

    async def run(
        self,
        request: pb.ExportRequest,
        permit: Permit,
        context: "grpc.aio.ServicerContext[Any, Any]",
        shard: str,
        draining: Callable[[], bool],
    ) -> None:
        """Writes an export to its end. Raises PermissionDenied, Unauthenticated, Unavailable and StoreError."""
        pattern = request.namespaces or "*"
        permit.require("admin", pattern)
        if self._running >= MOST:
            raise Unavailable(f"{MOST} exports are running, the limit of this shard; try again when one has ended")
        self._running += 1
        peer = context.peer()  # gRPC frees the call behind the context when its caller leaves
        end, done = pb.ExportEnd(), False
        try:
            newest = await self._history.read(lambda store: store.newest_epochs())
            # `require` compared two patterns as text; what counts is each name.
            names = [n for n in sorted(newest) if fnmatchcase(n, pattern) and permit.allows("admin", n)]
            held = [pb.StoredNamespace(namespace=name, newest_epoch=newest[name]) for name in names]
            start = pb.ExportStart(shard=shard, shared=self._history.shared, namespaces=held)
            await context.write(pb.ExportResponse(start=start).SerializeToString())
            for name in names:
                async for piece in self._pieces(name):
                    permit.require("admin", name)
                    if draining():
                        raise Unavailable("the server is draining; export again when it is back")
                    await context.write(piece.encoded)
                    end.problems += piece.problems
                    end.responses += piece.responses
            end.damaged = await self._history.read(lambda store: store.damaged_responses)
            await context.write(pb.ExportResponse(end=end).SerializeToString())
            done = True
        finally:
            self._running -= 1
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
    """The messages of a namespace; at least one, which has its estimator. Reads the store while it goes on."""
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
            part.responses.append(wire.stored(record))
            responses += 1
            size += record.size + EACH
    yield Piece(message.SerializeToString(), problems, responses)
