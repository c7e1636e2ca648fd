"""Refuses messages that are arriving when they take too much of the memory of the process, or too much time.

gRPC does not say how much of a message has arrived. The kernel knows how much memory the process holds, and how much
each connection has received. Both must be large: memory alone may be large because the engine merges segments. The
allocator could tell used memory from free memory, but to ask it takes 6 ms, in which other threads cannot allocate.
"""

import asyncio
import ctypes
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from histospec.server.errors import Crowded, HistoSpecError, Late
from histospec.server.logs.lines import Throttle
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.arrivals import MESSAGE_SECONDS, Arrivals
from histospec.server.rpc.connections import Connections

log = structlog.get_logger()
THROTTLE = Throttle()

COPIES = 3
"""The largest message takes so many times its size until it is handled: as gRPC receives it, in one piece, decoded."""
LEAST_MESSAGE = 64 << 20
"""Messages may take the memory of a message of this size, also if `--max-message` is smaller."""
PART = 1 << 20
"""Bytes that a connection has received while its stream awaits a message: then part of a message has arrived."""
TICK_SECONDS = 0.05
CALM_TICKS = 20  # between two looks at the connections while messages take little memory
SETTLE_SECONDS = 30.0
"""At least between two times at which free memory is given back: meanwhile other threads may be unable to allocate."""
MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
GROWTH = 4 << 10  # bytes received between two looks that make a message one that goes on arriving


class Stream(Protocol):
    """A stream of messages. It may wait for the next one as long as it likes, but not for the rest of one."""

    peer: str
    """HOST:PORT"""

    def awaited(self) -> int | None:
        """Returns the number of the message that is awaited; None if none is."""

    def refuse(self, error: HistoSpecError) -> None:
        """Ends the stream."""


class _Message(NamedTuple):
    """A message that is awaited."""

    number: int
    begin: int
    """Bytes that its connection had received before, at most, ..."""
    end: int
    """... and now."""
    stalled: bool
    """Whether none of it has arrived lately."""
    since: float
    """When it was first seen."""

    @property
    def arrived(self) -> int:
        return self.end - self.begin


class Governor:
    """Watches all calls of a server. Used only on the event loop.

    Beyond the limit, it refuses the messages that have stalled and then the largest, until the others have received no
    more than one message may have. So a message that arrives alone is never refused.

    Args:
        connections: know how much each has received.
        streams: the open streams.
        arrivals: the unary calls.
        accounted: returns the bytes of memory that the process holds for other purposes.
        largest: maximum bytes of a message.
        metrics: counts refused calls.
        seconds: for a message of a stream to arrive.

    """

    def __init__(
        self,
        connections: Connections,
        streams: Collection[Stream],
        arrivals: Sequence[Arrivals],
        accounted: Callable[[], int],
        largest: int,
        metrics: Metrics,
        seconds: float = MESSAGE_SECONDS,
    ) -> None:
        self._connections = connections
        self._streams = streams
        self._arrivals = arrivals
        self._accounted = accounted
        self._limited = metrics.caller_limits
        self._most = COPIES * max(largest, LEAST_MESSAGE)
        self._spared = max(largest, LEAST_MESSAGE) * 9 // 8  # with frames, and other messages of its connection
        self._seconds = seconds
        self._base = self._held()  # while no message arrives
        self._settled = time.monotonic()
        self._messages: dict[Any, _Message] = {}  # by call
        self._received: dict[str, int] = {}  # by peer, when the connections were last looked at

    async def run(self) -> None:
        """Watches until it is cancelled."""
        calm = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                held = self._held() - self._base
                calm = (calm + 1) % CALM_TICKS if held <= self._most // 2 else 0
                if calm == 0:
                    await self._look()
                    self._refuse_late()
                if held > self._most:
                    self._refuse_many()
                if calm == 0:
                    await self._settle(held)
            except Exception:
                log.exception("cannot refuse messages that are arriving")

    def _held(self) -> int:
        return _resident() - self._accounted()

    async def _settle(self, held: int) -> None:
        """Finds out what the process holds besides messages. Gives free memory back first if it may be much."""
        if time.monotonic() - self._settled < SETTLE_SECONDS:
            return
        self._settled = time.monotonic()
        if MALLOC_TRIM is not None and held > self._most // 2:
            await asyncio.to_thread(MALLOC_TRIM, 0)
        messages = sum(self._sizes().values()) + sum(arrivals.received for arrivals in self._arrivals)
        self._base = self._held() - COPIES * messages

    async def _look(self) -> None:
        """Updates the messages by what their connections have received."""
        heard: Counter[str] = Counter()
        awaited: dict[Any, int] = {}
        for arrivals in self._arrivals:
            heard += arrivals.heard
            arrivals.heard.clear()
            awaited |= dict.fromkeys(arrivals.calls, 0)
        awaited |= {stream: number for stream in self._streams if (number := stream.awaited()) is not None}
        received = {peer: counted.received for peer, counted in (await self._connections.traffic()).items()}
        messages: dict[Any, _Message] = {}
        for call, number in awaited.items():
            if call.peer not in received or (call in self._streams and call.awaited() != number):
                continue
            now, others = received[call.peer], heard[call.peer]
            message = self._messages.get(call)
            if message is None or message.number != number:
                before = self._received.get(call.peer, 0)
                message = _Message(number, before, now, False, time.monotonic())
            else:
                message = message._replace(end=now, stalled=now - message.end < GROWTH)
            if others:
                # A client has its stream on the same connection as its other calls. Messages that have arrived are no
                # part of this one.
                message = message._replace(begin=min(now, message.begin + others), since=time.monotonic())
            messages[call] = message
        self._messages, self._received = messages, received

    def _sizes(self) -> dict[str, int]:
        """Returns, by peer, the bytes of messages that have arrived in part. The calls of a connection share them."""
        sizes: dict[str, int] = {}
        for call, message in self._messages.items():
            sizes[call.peer] = max(sizes.get(call.peer, 0), message.arrived)
        return sizes

    def _refuse_late(self) -> None:
        for call, message in self._messages.items():
            late = time.monotonic() - message.since > self._seconds
            if late and message.arrived >= PART and call in self._streams:  # unary calls count the time themselves
                self._limited.labels("late").inc()
                call.refuse(Late(f"message: it did not arrive within {self._seconds:g} seconds"))

    def _refuse_many(self) -> None:
        by_peer: dict[str, list[Any]] = {}
        for call in self._messages:
            by_peer.setdefault(call.peer, []).append(call)
        sizes = self._sizes()
        stalled = {peer: all(self._messages[call].stalled for call in calls) for peer, calls in by_peer.items()}
        left, refused = sum(sizes.values()), 0
        for peer in sorted(by_peer, key=lambda peer: (stalled[peer], sizes[peer]), reverse=True):
            if left <= self._spared:
                break
            left -= sizes[peer]
            unary = [call for call in by_peer[peer] if call not in self._streams]
            most = max((self._messages[call].arrived for call in unary), default=0)
            for call in unary if most > sizes[peer] // 2 else by_peer[peer]:
                call.refuse(Crowded("message: messages that arrive at the same time take too much memory; try later"))
                refused += 1
        if refused:
            self._limited.labels("arriving").inc(refused)
            if (more := THROTTLE.admits("arriving")) is not None:
                log.warning("messages refused: too many arrive at the same time", calls=refused, **more)


def _resident() -> int:
    """Returns the resident bytes of the process; 0 if the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
