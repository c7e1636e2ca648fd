"""Bounds the memory of answers that callers do not read, and the time for which they are kept.

gRPC keeps an answer until HTTP/2's flow control lets it be sent, which the caller decides. So each answer counts until
then. If a caller reads nothing for some seconds, or others need the memory, the server ends the caller's connection:
gRPC has no other way to take an answer back.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from histospec.server.errors import LimitExceeded
from histospec.server.logs.lines import Throttle
from histospec.server.rpc.connections import Connections, peer_of

log = structlog.get_logger()
THROTTLE = Throttle()

SMALL_ANSWER = 256 << 10
"""Bytes of an answer from which on it is large: only LARGE_AT_ONCE of these are in memory."""
LARGE_AT_ONCE = 2
LARGE_WAITING = 256
"""Calls that may wait for a large answer; further ones are refused."""
MAX_UNREAD = 64 << 20
"""Bytes of all small answers that callers have not read."""
READ_SECONDS = 10.0
"""Time in which a caller must read LEAST_READ bytes of an answer, or the rest ..."""
CROWDED_SECONDS = 1.0
"""... if others wait for the memory."""
LONGEST_SECONDS, LONGEST_CROWDED_SECONDS = 60.0, 10.0
"""Time in which a caller must have read a whole answer: it may read other answers meanwhile."""
LEAST_READ = 64 << 10
CHECK_SECONDS = 0.25


class _Unread:
    """An answer that is being written."""

    def __init__(self, peer: str, size: int) -> None:
        self.peer = peer
        self.size = size
        self.read = 0  # bytes that the peer had read of everything at the last check
        self.started = self.since = time.monotonic()  # `since`: when it had last read enough


class Answering:
    """The unread answers of all calls of a server. Used only on the event loop."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._unread: set[_Unread] = set()
        self._bytes = 0
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._waiting = 0  # calls that wait for memory
        self._watching: asyncio.Task[None] | None = None

    async def write(self, context: Any, data: bytes, counted: bool = True) -> None:
        """Writes an answer. Raises LimitExceeded if there is no memory for it; not if it is not `counted`."""
        if counted and self._bytes and self._bytes + len(data) > MAX_UNREAD:
            await self._wait(len(data))
        answer = _Unread(peer_of(context.peer()), len(data))
        self._unread.add(answer)
        self._bytes += answer.size * counted
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        try:
            await context.write(data)
        finally:
            self._unread.discard(answer)
            self._bytes -= answer.size * counted

    @asynccontextmanager
    async def large(self) -> AsyncIterator[None]:
        """The block makes and writes a large answer. Waits for its turn. Raises LimitExceeded."""
        if self._waiting >= LARGE_WAITING:
            raise LimitExceeded(f"answer: {LARGE_WAITING} calls already wait for large answers; try later")
        self._waiting += 1
        try:
            await self._large.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._large.release()

    async def _wait(self, size: int) -> None:
        """Waits for callers to read, or to lose their connection."""
        until = time.monotonic() + READ_SECONDS
        self._waiting += 1
        try:
            while self._bytes and self._bytes + size > MAX_UNREAD:
                if time.monotonic() > until:
                    text = f"answer: its {size} bytes are too many beside {self._bytes} that callers have not read"
                    raise LimitExceeded(f"{text}; the limit is {MAX_UNREAD}; try later")
                await asyncio.sleep(CHECK_SECONDS / 10)
        finally:
            self._waiting -= 1

    async def _watch(self) -> None:
        """Ends the connections of callers that do not read, until all answers are read."""
        try:
            while self._unread:
                await asyncio.sleep(CHECK_SECONDS)
                patience = CROWDED_SECONDS if self._waiting else READ_SECONDS
                due = [answer for answer in self._unread if time.monotonic() - answer.since > patience]
                if due:
                    try:
                        await self._check(due)
                    except Exception:
                        log.exception("cannot end the connections of callers that read nothing")
        finally:
            self._watching = None

    async def _check(self, due: list[_Unread]) -> None:
        traffic = await asyncio.to_thread(self._connections.traffic, {answer.peer for answer in due})
        stalled: Counter[str] = Counter()
        for answer in due:
            read = traffic[answer.peer].read if answer.peer in traffic else answer.read
            longest = LONGEST_CROWDED_SECONDS if self._waiting else LONGEST_SECONDS
            if read - answer.read >= LEAST_READ and time.monotonic() - answer.started < longest:
                answer.read, answer.since = read, time.monotonic()
            elif answer in self._unread:
                stalled[answer.peer] += answer.size
        if not stalled:
            return
        await asyncio.to_thread(self._connections.hang_up, set(stalled))
        for peer, size in stalled.items():
            if (more := THROTTLE.admits("unread")) is not None:
                log.warning("a caller does not read its answers: connection ended", peer=peer, bytes=size, **more)
