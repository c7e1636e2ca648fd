"""Bounds what peers of the HTTP port may hold: connections, bytes of a request, and the time of each stage.

aiohttp waits for a request without limit and accepts any number of connections. But probes must always get through, and
gRPC and the store need descriptors. So each connection has a deadline, and if there are too many, the one that has
waited longest is closed: a new connection is always accepted.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from aiohttp import web

MAX_CONNECTIONS = 256
PEER_SHARE = 4  # one peer may hold a quarter of the connections
MAX_REQUEST = 32 << 10  # bytes; a probe sends a few hundred

RECEIVING, ANSWERING, IDLE = "receiving", "answering", "idle"
SECONDS = {
    RECEIVING: 10.0,  # from the first byte of a request, or the start of the connection, to its last header
    ANSWERING: 60.0,
    IDLE: 75.0,  # between two requests; the peer reads the answer meanwhile
}
"""Seconds that each stage of a connection may take."""

LATE, LARGE, CROWDED = "late", "large", "crowded"
CLOSED = (LATE, LARGE, CROWDED)
"""Why the server closes a connection: past a deadline, too many bytes, too many connections."""


class Connections:
    """All connections of the HTTP port.

    Args:
        server: creates aiohttp's protocol of a connection.
        closed: called with one of CLOSED for each connection that the server closes.
        most: maximum number of connections.
        seconds: maximum duration of each stage.

    """

    def __init__(
        self,
        server: Callable[[], asyncio.Protocol],
        closed: Callable[[str], None],
        most: int = MAX_CONNECTIONS,
        seconds: Mapping[str, float] = SECONDS,
    ) -> None:
        self._server = server
        self._most = most
        self._each = max(1, most // PEER_SHARE)
        self._peers: Counter[str] = Counter()
        self._open: dict[asyncio.Transport, _Connection] = {}
        self.closed = closed
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection, for `loop.create_server`."""
        return _Connection(self, self._server())

    def enter(self, transport: asyncio.Transport, connection: "_Connection") -> None:
        """Adds a new connection. Closes another one first if there are too many."""
        self._close_one_of_too_many(connection.peer)
        self._open[transport] = connection
        self._peers[connection.peer] += 1

    def leave(self, transport: asyncio.Transport) -> None:
        """Removes a connection."""
        peer = self._open.pop(transport).peer
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]

    def _close_one_of_too_many(self, peer: str) -> None:
        if self._peers[peer] >= self._each:
            crowd = peer
        elif len(self._open) >= self._most:
            [(crowd, _)] = self._peers.most_common(1)
        else:
            return
        candidates = [connection for connection in self._open.values() if connection.peer == crowd]
        min(candidates, key=lambda connection: (connection.stage == ANSWERING, connection.since)).close(CROWDED)

    @web.middleware
    async def watch(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Tells a connection when its request is complete and when it is answered."""
        transport = request.transport
        connection = None if transport is None else self._open.get(transport)
        if connection is None:  # the peer left
            return await handler(request)
        connection.begin(ANSWERING)
        try:
            return await handler(request)
        finally:
            connection.begin(IDLE)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol and enforces the deadlines."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self.eof_received, self.pause_writing = inner.eof_received, inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received = 0  # bytes since the last complete request
        self.peer = ""
        self.stage = RECEIVING
        self.since = 0.0

    def begin(self, stage: str) -> None:
        """Starts a stage and its deadline."""
        if self._transport is None:
            return
        if stage == ANSWERING:
            self._received = 0
        self.stage = stage
        self.since = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._connections.seconds[stage], self.close, LATE)

    def close(self, why: str) -> None:
        """Closes the connection at once."""
        transport = self._transport
        if transport is not None:
            self._connections.closed(why)
            self._leave()
            transport.abort()

    def _leave(self) -> None:
        if self._transport is not None:
            self._connections.leave(self._transport)
            self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        connected = cast(asyncio.Transport, transport)
        self.peer = _peer(connected)
        self._connections.enter(connected, self)
        self._transport = connected
        self.begin(RECEIVING)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._received += len(data)
        if self._received > MAX_REQUEST:
            self.close(LARGE)
        if self._transport is None:
            return
        if self.stage == IDLE:
            self.begin(RECEIVING)
        self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._leave()
        self._inner.connection_lost(exc)


def _peer(transport: asyncio.BaseTransport) -> str:
    """Returns the address of a peer; for IPv6 its /64 network, because one machine can use any address in it."""
    name = transport.get_extra_info("peername")
    host = str(name[0]).partition("%")[0] if name else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
