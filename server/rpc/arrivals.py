"""Bounds the memory and the time of requests that are still arriving.

gRPC receives a message only on request, but then all of it, and does not say how much has arrived. So:

- Only AT_ONCE messages begin to arrive at a time. A message that takes longer than a moment gives its place to the next
  one, and goes on arriving until MESSAGE_SECONDS are over. A caller that sends only headers delays others by a moment.
- While received requests take MAX_RECEIVED bytes, no further one begins to arrive.
- If the process holds more memory than messages may take, `Governor` refuses those that are arriving.
"""

import asyncio
import ctypes
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

import grpc.aio
import structlog

from histospec.server.errors import HistoSpecError, InvalidRequest, Late, LimitExceeded
from histospec.server.logs.lines import Throttle
from histospec.server.rpc.connections import Connections, peer_of
from histospec.server.rpc.wire import Undecodable
from histospec.server.security.access import Permit

log = structlog.get_logger()
THROTTLE = Throttle()

AT_ONCE = 4
MOMENT_SECONDS = 0.1
MESSAGE_SECONDS = 30.0
"""Seconds for a message to arrive."""
MAX_RECEIVED = 64 << 20
"""Bytes of requests that are being handled; further ones wait before they are received."""
PENDING, PENDING_EACH = 2048, 1024
"""Calls whose message has not arrived: of all callers, and of one token, or of one host without tokens."""

MAX_ARRIVING = 128 << 20
"""Bytes that the process may hold beyond what it accounts for, before messages that are arriving are refused."""
TICK_SECONDS = 0.05
GROWTH = 4 << 10  # bytes received in a tick that make a message one that is arriving


class Arriving(Protocol):
    """A call whose message may be arriving."""

    peer: str
    """HOST:PORT"""

    def awaited(self) -> int | None:
        """Returns the number of the message that is awaited; None if none is."""

    def refuse(self, error: HistoSpecError) -> None:
        """Ends the call."""


class _Call:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.refused: asyncio.Future[HistoSpecError] = asyncio.get_running_loop().create_future()

    def awaited(self) -> int | None:
        return 0

    def refuse(self, error: HistoSpecError) -> None:
        if not self.refused.done():
            self.refused.set_result(error)


class Received(NamedTuple):
    """A request and its size in bytes before it was decoded."""

    request: Any
    size: int


def sized(decode: Callable[[bytes], Any]) -> Callable[[bytes], Received]:
    """Returns `decode`, with the size of what it decoded."""
    return lambda data: Received(decode(data), len(data))


class Arrivals:
    """Unary calls whose message has not arrived. Their decoder is `sized`. Used only on the event loop.

    `most_handled`: how many requests may be handled at the same time before others wait to be received.
    """

    def __init__(self, most_handled: int = sys.maxsize) -> None:
        self.calls: set[_Call] = set()
        self._most_handled = most_handled
        self._handled = 0
        self._places = asyncio.Semaphore(AT_ONCE)
        self._pending: Counter[str] = Counter()  # by caller
        self._received = 0
        self._room = asyncio.Event()
        self._room.set()

    @asynccontextmanager
    async def receive(self, context: Any, caller: str) -> AsyncIterator[Any]:
        """Yields the request of a call; the block handles it.

        Raises InvalidRequest without a message, LimitExceeded and Late.
        """
        received = await self._in_turn(context, caller)
        size = received.size
        self._count(1, size)
        try:
            if isinstance(received.request, Undecodable):
                received.request.refuse()
            yield received.request
        finally:
            self._count(-1, -size)

    def _count(self, requests: int, size: int) -> None:
        self._handled += requests
        self._received += size
        if self._received > MAX_RECEIVED or self._handled >= self._most_handled:
            self._room.clear()
        else:
            self._room.set()

    async def _in_turn(self, context: Any, caller: str) -> Received:
        if self._pending[caller] >= PENDING_EACH or self._pending.total() >= PENDING:
            raise LimitExceeded(
                f"{self._pending[caller]} calls of this token or host, of {self._pending.total()} in all, have sent no "
                f"whole message yet; the limits are {PENDING_EACH} and {PENDING}; try later"
            )
        self._pending[caller] += 1
        try:
            return await self._receive(context)
        finally:
            self._pending[caller] -= 1
            if not self._pending[caller]:
                del self._pending[caller]

    async def _receive(self, context: Any) -> Received:
        await self._places.acquire()
        try:
            await self._room.wait()
        except BaseException:
            self._places.release()
            raise
        call = _Call(peer_of(context.peer()))
        self.calls.add(call)
        reading = asyncio.ensure_future(context.read())
        try:
            try:
                await asyncio.wait((reading, call.refused), timeout=MOMENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._places.release()
            if not reading.done() and not call.refused.done():
                left = MESSAGE_SECONDS - MOMENT_SECONDS
                await asyncio.wait((reading, call.refused), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if call.refused.done() and not reading.done():
                raise call.refused.result()
            if not reading.done():
                raise Late(f"message: it did not arrive within {MESSAGE_SECONDS:g} seconds")
            message = reading.result()
        finally:
            self.calls.discard(call)
            reading.cancel()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise InvalidRequest("message: is missing")
        received: Received = message
        return received


def caller(permit: Permit, context: Any) -> str:
    """Returns whose call it is: of a token, or of a host without tokens."""
    return permit.digest or peer_of(context.peer()).rpartition(":")[0]


class Governor:
    """Refuses messages that are arriving while the process holds too much memory for messages.

    Args:
        connections: says whether a message arrives.
        arriving: returns the calls.
        accounted: returns the bytes of memory that the process holds for other purposes.

    """

    def __init__(
        self, connections: Connections, arriving: Callable[[], Iterable[Arriving]], accounted: Callable[[], int]
    ) -> None:
        self._connections = connections
        self._arriving = arriving
        self._accounted = accounted
        self._base = self._held()
        self._false_alarm = 0  # resident bytes that were found to be free memory

    async def run(self) -> None:
        """Watches until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._too_much():
                try:
                    await self._refuse()
                except Exception:
                    log.exception("cannot refuse messages that are arriving")

    def _too_much(self) -> bool:
        """Returns whether messages hold too much. Asks the allocator, which takes longer, only if it may be so."""
        resident = _resident()
        if resident - self._accounted() - self._base <= MAX_ARRIVING or resident <= self._false_alarm:
            return False
        if self._held() - self._base > MAX_ARRIVING:
            return True
        self._false_alarm = resident + MAX_ARRIVING // 8
        return False

    def _held(self) -> int:
        return (_allocated() or _resident()) - self._accounted()

    async def _refuse(self) -> None:
        calls = {call: number for call in self._arriving() if (number := call.awaited()) is not None}
        peers = {call.peer for call in calls}
        before = await asyncio.to_thread(self._connections.traffic, peers)
        await asyncio.sleep(TICK_SECONDS)
        after = await asyncio.to_thread(self._connections.traffic, peers)
        refused = 0
        for call, number in calls.items():
            if call.peer not in before or call.peer not in after or call.awaited() != number:
                continue
            if after[call.peer].received - before[call.peer].received >= GROWTH:
                call.refuse(
                    LimitExceeded("message: messages that arrive at the same time take too much memory; try later")
                )
                refused += 1
        if refused and (more := THROTTLE.admits("arriving")) is not None:
            log.warning("messages refused: too many arrive at the same time", calls=refused, **more)


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _mallinfo() -> Callable[[], Any] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # of the GNU C library
    if function is not None:
        function.restype = _Mallinfo
    return function


_mallinfo2 = _mallinfo()


def _allocated() -> int:
    """Returns the bytes that the process has allocated and not freed; 0 if the allocator does not say."""
    if _mallinfo2 is None:
        return 0
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _resident() -> int:
    """Returns the resident bytes of the process; 0 if the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
