"""Bounds the memory and the time of requests that are still arriving.

gRPC receives a message only on request, but then all of it, and does not say how much has arrived. So:

- Only AT_ONCE messages begin to arrive at a time. A message that takes longer than a moment gives its place to the next
  one, and goes on arriving until its time is over. Callers and their connections take turns, so calls that send only
  headers delay those of another caller or connection by a moment at most.
- While the received requests of a caller take MAX_RECEIVED_EACH bytes, or all MAX_RECEIVED, no further one begins to
  arrive.
- If the process holds more memory than messages may take, `governor.Governor` refuses those that are arriving.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc.aio

from histospec.server.errors import HistoSpecError, InvalidRequest, Late, LimitExceeded
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.connections import peer_of
from histospec.server.rpc.encoded import Undecodable
from histospec.server.rpc.places import Places
from histospec.server.security.access import Permit

AT_ONCE, AT_ONCE_EACH, AT_ONCE_CONNECTION = 4, 3, 2
"""Messages that begin to arrive at a time: in all, of one caller, and of one connection."""
MOMENT_SECONDS = 0.1
MESSAGE_SECONDS = 30.0
"""Seconds for a message to arrive."""
PAUSE_SECONDS = 2.0
"""After a message of a caller was refused for memory, until the next one begins to arrive. To receive messages that are
refused takes the time of others."""
LARGE, READ_PACE = 1 << 20, 4 << 20
"""A message of 16 MiB delays steps by 20 to 30 ms while gRPC copies and decodes it. Requests that read are rarely that
large, so the next one of the caller waits: a second per READ_PACE bytes."""
MAX_RECEIVED, MAX_RECEIVED_EACH = 96 << 20, 32 << 20
"""Bytes of requests that are being handled, of all callers and of one; further ones wait before they are received. One
caller exceeds its share by at most one message, and leaves room for others."""
REPEATED, PART_BYTES = ("problems", "responses"), 200
"""The fields of requests that may have thousands of parts. A part takes 120 to 220 bytes in addition to its tokens."""
PENDING, PENDING_EACH = 2048, 1024
"""Calls whose message has not arrived: of all callers, and of one token, or of one host without tokens."""


class NoMessage(InvalidRequest):
    """The call ended without a message."""


class ArrivingCall:
    """A unary call whose message may be arriving. `end` ends it."""

    def __init__(self, peer: str, end: Callable[[], object]) -> None:
        self.peer = peer
        self.refused: HistoSpecError | None = None
        self._end = end

    def refuse(self, error: HistoSpecError) -> None:
        """Ends the call with an error."""
        if self.refused is None:
            self.refused = error
            self._end()


class Received(NamedTuple):
    """A request."""

    request: Any
    size: int
    """In bytes, before it was decoded."""
    parts: int = 0

    @property
    def memory(self) -> int:
        """The bytes that it takes, about."""
        return self.size + PART_BYTES * self.parts


def sized(decode: Callable[[bytes], Any]) -> Callable[[bytes], Received]:
    """Returns `decode`, with the size of what it decoded."""

    def decoded(data: bytes) -> Received:
        request = decode(data)
        return Received(request, len(data), sum(len(getattr(request, name, ())) for name in REPEATED))

    return decoded


class Arrivals:
    """Calls of one kind whose message has not arrived. Their decoder is `sized`. Used only on the event loop.

    Args:
        metrics: counts calls that are refused.
        most_handled: how many requests may be handled at the same time before others wait to be received.
        pending_each: calls of one caller whose message has not arrived.
        seconds: for a message to arrive.
        moment: seconds of these in which it keeps its place.
        pause: seconds after a message of a caller was refused for memory, until the next one begins to arrive.
        pace: after a large message of a caller, it pauses for a second per so many bytes.

    """

    def __init__(
        self,
        metrics: Metrics,
        most_handled: int = sys.maxsize,
        pending_each: int = PENDING_EACH,
        seconds: float = MESSAGE_SECONDS,
        moment: float = MOMENT_SECONDS,
        pause: float = PAUSE_SECONDS,
        pace: float = math.inf,
    ) -> None:
        self.calls: set[ArrivingCall] = set()
        self.heard: Counter[str] = Counter()
        """By peer: bytes of messages that have arrived since this was last cleared."""
        self._limited = metrics.caller_limits
        self._most_handled = most_handled
        self._pending_each = pending_each
        self._seconds = seconds
        self._moment = moment
        self._pause = pause
        self._pace = pace
        self._handled = 0
        self._places = Places(AT_ONCE, AT_ONCE_EACH, AT_ONCE_CONNECTION, self._has_room)
        self._pending: Counter[str] = Counter()  # by caller
        self._received: Counter[str] = Counter()  # bytes by caller
        self._paused: Counter[str] = Counter()  # by caller: reasons

    @property
    def received(self) -> int:
        """The bytes of requests that are being handled."""
        return self._received.total()

    @asynccontextmanager
    async def receive(self, context: Any, caller: str) -> AsyncIterator[Any]:
        """Yields the next request of a call; the block handles it.

        Raises NoMessage, LimitExceeded, Late and the error of a message that must not be decoded.
        """
        received = await self._in_turn(context, caller)
        self._count(caller, 1, received.memory)
        try:
            if isinstance(received.request, Undecodable):
                received.request.refuse()
            yield received.request
        finally:
            self._count(caller, -1, -received.memory)

    def _count(self, caller: str, requests: int, size: int) -> None:
        self._handled += requests
        self._received[caller] += size
        if not self._received[caller]:
            del self._received[caller]
        if size < 0:
            self._places.give()

    def _has_room(self, caller: str) -> bool:
        return (
            caller not in self._paused
            and self._received[caller] <= MAX_RECEIVED_EACH
            and self._handled < self._most_handled
            and self.received <= MAX_RECEIVED
        )

    def _pause_for(self, caller: str, seconds: float) -> None:
        self._paused[caller] += 1
        asyncio.get_running_loop().call_later(seconds, self._resume, caller)

    def _resume(self, caller: str) -> None:
        self._paused[caller] -= 1
        if not self._paused[caller]:
            del self._paused[caller]
        self._places.give()

    async def _in_turn(self, context: Any, caller: str) -> Received:
        if self._pending[caller] >= self._pending_each or self._pending.total() >= PENDING:
            self._limited.labels("calls").inc()
            raise LimitExceeded(
                f"{self._pending[caller]} calls of this token or host, of {self._pending.total()} in all, have sent no "
                f"whole message yet; the limits are {self._pending_each} and {PENDING}; try later"
            )
        self._pending[caller] += 1
        try:
            return await self._receive(context, caller)
        finally:
            self._pending[caller] -= 1
            if not self._pending[caller]:
                del self._pending[caller]

    async def _receive(self, context: Any, caller: str) -> Received:
        peer = peer_of(context.peer())
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        leave = await self._places.take(caller, peer)
        # A task of its own for the message, and `asyncio.wait`, would take 20 microseconds more of each call.
        call = ArrivingCall(peer, task.cancel)
        late = Late(f"message: it did not arrive within {self._seconds:g} seconds")
        timers = loop.call_later(self._moment, leave), loop.call_later(self._seconds, call.refuse, late)
        self.calls.add(call)
        try:
            message = await context.read()
        except asyncio.CancelledError:
            if call.refused is None:
                raise
            if call.refused is late:
                self._limited.labels("late").inc()
            else:
                self._pause_for(caller, self._pause)
            raise call.refused from None
        finally:
            self.calls.discard(call)
            leave()
            for timer in timers:
                timer.cancel()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise NoMessage("message: is missing")
        received: Received = message
        self.heard[peer] += received.size
        if received.size > LARGE:
            self._pause_for(caller, received.size / self._pace)
        return received


def caller(permit: Permit, context: Any) -> str:
    """Returns whose call it is: of a token, or of a host without tokens."""
    return permit.digest or peer_of(context.peer()).rpartition(":")[0]
