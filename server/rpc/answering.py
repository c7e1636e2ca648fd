"""Bounds the memory of answers that callers do not read, and the time for which they are kept.

gRPC keeps an answer until HTTP/2's flow control lets it be sent, which the caller decides. So each answer counts until
then. If a caller reads nothing for some seconds, or others need the memory, the server ends the caller's connection:
gRPC has no other way to take an answer back.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import structlog

from histospec.server.errors import Crowded, LimitExceeded
from histospec.server.logs.lines import Throttle
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.connections import Connections, peer_of
from histospec.server.rpc.places import Places

log = structlog.get_logger()
THROTTLE = Throttle()

SMALL_ANSWER = 256 << 10
"""Bytes of an answer from which on it is large: only LARGE_AT_ONCE of these are in memory."""
LARGE_AT_ONCE, LARGE_EACH = 2, 1
"""Large answers at a time, in all and for one caller."""
PACED, PACE = 8 << 20, 8 << 20
"""For an answer of 48 MiB, gRPC's copy delays a step by 30 ms, and reading and encoding it delay some by 3 ms. So after
an answer of more than PACED bytes, the caller's next large one waits: a second for each further PACE bytes."""
LARGE_WAITING_EACH = 128
"""Calls of one caller that may wait for a large answer; further ones are refused."""
MADE_AT_ONCE, MADE_EACH, MADE_FOR_CONNECTION = 4, 3, 2
"""Small answers of one method that are made at a time: in all, for one caller, for one connection. Meanwhile the event
loop gets the interpreter's lock late."""
MAX_UNREAD, MAX_UNREAD_EACH = 64 << 20, 4 << 20
"""Bytes of small answers that callers have not read: of all connections, and of one."""
READ_SECONDS = 10.0
"""Time in which a caller must read LEAST_READ bytes of an answer, or the rest ..."""
CROWDED_SECONDS = 1.0
"""... if others wait for the memory."""
LONGEST_SECONDS, LONGEST_CROWDED_SECONDS = 60.0, 10.0
"""Time in which a caller must have read a whole answer: it may read other answers meanwhile."""
LEAST_READ = 64 << 10
CHECK_SECONDS = 0.25
WAIT_SECONDS, WAITS = 0.025, 1000
"""While connections have no memory for answers, each checks every WAIT_SECONDS, but all of them at most WAITS times a
second."""


class _Unread:
    """An answer that is being written."""

    def __init__(self, peer: str, size: int) -> None:
        self.peer = peer
        self.size = size
        self.read = 0  # bytes that the peer had read of everything at the last check
        self.started = self.since = time.monotonic()  # `since`: when it had last read enough


class Answering:
    """The unread answers of all calls of a server. Used only on the event loop."""

    def __init__(self, connections: Connections, metrics: Metrics) -> None:
        self._connections = connections
        self._limited = metrics.caller_limits
        self._unread: set[_Unread] = set()
        self._bytes: Counter[str] = Counter()  # of small answers, by peer
        self._large = Places(LARGE_AT_ONCE, LARGE_EACH, LARGE_EACH)
        self._resting: dict[str, float] = {}  # by caller: until when it gets no large answer
        self._making: dict[str, Places] = {}  # by method
        # By peer: the calls that wait for memory. The first one checks.
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._checking = 0
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, method: str, caller: str, peer: str) -> AsyncIterator[None]:
        """The block makes an answer, when it is the turn of the caller and the connection has memory. Raises Crowded.

        Answers that wait for their connection would take memory, so they are not made. Write the answer with `waits`
        False.
        """
        places = self._making.get(method)
        if places is None:
            places = self._making[method] = Places(MADE_AT_ONCE, MADE_EACH, MADE_FOR_CONNECTION)
        while True:
            await self._room(peer, SMALL_ANSWER, READ_SECONDS)
            async with places.place(caller, peer):
                if self._has_room(peer, SMALL_ANSWER):
                    yield
                    return

    async def write(self, context: Any, data: bytes, waits: bool = True) -> None:
        """Writes an answer. `waits`: until there is memory for it; raises Crowded after some seconds."""
        async with self.unread(peer_of(context.peer()), len(data), READ_SECONDS if waits else None):
            await context.write(data)

    @asynccontextmanager
    async def unread(self, peer: str, size: int, patience: float | None, counted: bool = True) -> AsyncIterator[None]:
        """The block writes an answer of `size` bytes to a peer. Raises Crowded.

        `patience`: seconds that it waits for memory; None: it does not wait. `counted`: a large answer is not, because
        it has its place.
        """
        if patience is not None:
            await self._room(peer, size, patience)
        answer = _Unread(peer, size)
        if counted:
            self._bytes[peer] += size
        self._unread.add(answer)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            self._unread.discard(answer)
            if counted:
                self._bytes[peer] -= size
                if not self._bytes[peer]:
                    del self._bytes[peer]

    async def write_large(self, context: Any, caller: str, make: Callable[[], Awaitable[bytes]]) -> None:
        """Makes and writes a large answer when it is the caller's turn. Raises LimitExceeded and errors of `make`."""
        if self._large.waiting(caller) >= LARGE_WAITING_EACH:
            self._limited.labels("answers").inc()
            raise LimitExceeded(
                f"answer: {LARGE_WAITING_EACH} calls of this token or host already wait for large answers; try later"
            )
        async with self._large.place(caller, peer_of(context.peer())):
            await asyncio.sleep(self._resting.get(caller, 0.0) - time.monotonic())
            data = await make()
            now = time.monotonic()
            self._resting = {resting: until for resting, until in self._resting.items() if until > now}
            if (excess := len(data) - PACED) > 0:
                self._resting[caller] = now + excess / PACE
            async with self.unread(peer_of(context.peer()), len(data), None, counted=False):
                await context.write(data)

    def _has_room(self, peer: str, size: int) -> bool:
        mine, all_of_them = self._bytes.get(peer, 0), self._bytes.total()
        return (not mine or mine + size <= MAX_UNREAD_EACH) and (not all_of_them or all_of_them + size <= MAX_UNREAD)

    async def _room(self, peer: str, size: int, patience: float) -> None:
        """Waits for callers to read, or to lose their connection. Raises Crowded."""
        if self._has_room(peer, size) and peer not in self._queues:
            return
        until = time.monotonic() + patience
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = asyncio.Lock()
        async with queue:
            self._checking += 1
            try:
                while not self._has_room(peer, size):
                    if time.monotonic() > until:
                        self._limited.labels("answers").inc()
                        text = f"answer: there is no memory for its {size} bytes; callers have yet to read"
                        text = f"{text} {self._bytes.total()} bytes, {self._bytes[peer]} of them on this connection"
                        raise Crowded(f"{text}; the limits are {MAX_UNREAD} and {MAX_UNREAD_EACH}; try later")
                    await asyncio.sleep(max(WAIT_SECONDS, self._checking / WAITS))
            finally:
                self._checking -= 1

    @property
    def _crowded(self) -> bool:
        full = self._bytes.total() + SMALL_ANSWER > MAX_UNREAD  # a full connection is no reason to end it soon
        return (full and self._checking > 0) or self._large.wanted

    async def _watch(self) -> None:
        """Ends the connections of callers that do not read, until all answers are read."""
        try:
            while self._unread:
                await asyncio.sleep(CHECK_SECONDS)
                patience = CROWDED_SECONDS if self._crowded else READ_SECONDS
                due = [answer for answer in self._unread if time.monotonic() - answer.since > patience]
                if due:
                    try:
                        await self._check(due)
                    except Exception:
                        log.exception("cannot end the connections of callers that read nothing")
        finally:
            self._watching = None

    async def _check(self, due: list[_Unread]) -> None:
        traffic = await self._connections.traffic({answer.peer for answer in due})
        stalled: Counter[str] = Counter()
        for answer in due:
            read = traffic[answer.peer].read if answer.peer in traffic else answer.read
            longest = LONGEST_CROWDED_SECONDS if self._crowded else LONGEST_SECONDS
            if read - answer.read >= LEAST_READ and time.monotonic() - answer.started < longest:
                answer.read, answer.since = read, time.monotonic()
            elif answer in self._unread:
                stalled[answer.peer] += answer.size
        if not stalled:
            return
        await self._connections.hang_up(set(stalled))
        self._limited.labels("unread").inc(len(stalled))
        for peer, size in stalled.items():
            if (more := THROTTLE.admits("unread")) is not None:
                log.warning("a caller does not read its answers: connection ended", peer=peer, bytes=size, **more)
