"""Refuses messages that are arriving when they take too much of the memory of the process.

gRPC does not say how much of a message has arrived. The allocator knows how much memory the process holds, and the
kernel how much each connection has received. Both must be large: memory alone may be large because the engine merges
segments.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import structlog

from histospec.server.errors import HistoSpecError, LimitExceeded
from histospec.server.logs.lines import Throttle
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.arrivals import ArrivingCall
from histospec.server.rpc.connections import Connections

log = structlog.get_logger()
THROTTLE = Throttle()

COPIES = 3
"""The largest message takes so many times its size until it is handled: as gRPC receives it, in one piece, decoded."""
LEAST_MESSAGE = 64 << 20
"""Messages may take the memory of a message of this size, also if `--max-message` is smaller."""
TICK_SECONDS = 0.05


class Arriving(Protocol):
    """A call whose message may be arriving."""

    peer: str
    """HOST:PORT"""

    def awaited(self) -> int | None:
        """Returns the number of the message that is awaited; None if none is."""

    def refuse(self, error: HistoSpecError) -> None:
        """Ends the call."""


class _Begun(NamedTuple):
    """A message that is awaited, when it was first seen."""

    number: int
    received: int
    """Bytes that its connection had received."""


class Governor:
    """Watches all calls of a server. Used only on the event loop.

    Beyond the limit, it refuses the messages that have received most, until the others have received no more than one
    message may have. So a message that arrives alone is never refused.

    Args:
        connections: know how much each has received.
        arriving: returns the calls.
        accounted: returns the bytes of memory that the process holds for other purposes.
        largest: maximum bytes of a message.
        metrics: counts refused calls.

    """

    def __init__(
        self,
        connections: Connections,
        arriving: Callable[[], Iterable[Arriving]],
        accounted: Callable[[], int],
        largest: int,
        metrics: Metrics,
    ) -> None:
        self._connections = connections
        self._arriving = arriving
        self._accounted = accounted
        self._limited = metrics.caller_limits.labels("arriving")
        self._most = COPIES * max(largest, LEAST_MESSAGE)
        self._spared = max(largest, LEAST_MESSAGE) * 9 // 8  # with frames, and other messages of its connection
        self._base = self._held()
        self._false_alarm = 0  # resident bytes that were found to be free memory
        self._begun: dict[Arriving, _Begun] = {}

    async def run(self) -> None:
        """Watches until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            held = self._held_for_messages()
            if held <= self._most // 2:
                self._begun.clear()
                continue
            try:
                arrived = await self._arrived()
                if held > self._most:
                    self._refuse(arrived)
            except Exception:
                log.exception("cannot refuse messages that are arriving")

    def _held_for_messages(self) -> int:
        """Returns the bytes that messages may hold. Asks the allocator, which takes longer, only if they are many."""
        resident = _resident()
        held = resident - self._accounted() - self._base
        if held <= self._most // 2 or resident <= self._false_alarm:
            return 0
        held = self._held() - self._base
        if held <= self._most // 2:
            self._false_alarm = resident + self._most // 12
        return held

    def _held(self) -> int:
        return (_allocated() or _resident()) - self._accounted()

    async def _arrived(self) -> dict[str, int]:
        """Returns the bytes of messages that have arrived on each connection since they were first seen."""
        awaited = {call: number for call in self._arriving() if (number := call.awaited()) is not None}
        traffic = await self._connections.traffic({call.peer for call in awaited})
        begun, arrived = {}, dict.fromkeys(traffic, 0)
        for call, number in awaited.items():
            if call.peer not in traffic or call.awaited() != number:
                continue
            received = traffic[call.peer].received
            before = self._begun.get(call)
            begun[call] = before if before and before.number == number else _Begun(number, received)
            arrived[call.peer] = max(arrived[call.peer], received - begun[call].received)
        self._begun = begun
        return arrived

    def _refuse(self, arrived: dict[str, int]) -> None:
        left, refused = sum(arrived.values()), 0
        for peer in sorted(arrived, key=arrived.__getitem__, reverse=True):
            if left <= self._spared:
                break
            left -= arrived[peer]
            calls = [call for call in self._begun if call.peer == peer]
            # A client has its stream on the same connection as its other calls.
            for call in [call for call in calls if isinstance(call, ArrivingCall)] or calls:
                call.refuse(
                    LimitExceeded("message: messages that arrive at the same time take too much memory; try later")
                )
                refused += 1
        if refused:
            self._limited.inc(refused)
            if (more := THROTTLE.admits("arriving")) is not None:
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
