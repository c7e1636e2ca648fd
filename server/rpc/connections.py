"""The TCP connections behind gRPC's calls.

gRPC can neither end a call whose peer reads nothing, nor say how much of a message has arrived. The kernel can do both.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

DESCRIPTORS = Path("/proc/self/fd")  # elsewhere than on Linux, no connection is found
TCP_INFO_BYTES = 256
ACKED_AND_RECEIVED = 120  # offset of two 64-bit numbers in the kernel's tcp_info
MAPPED = "::ffff:"  # begins an IPv4 address on an IPv6 socket


class Traffic(NamedTuple):
    """Bytes of a connection since its start."""

    read: int
    """That the peer's machine has acknowledged."""
    received: int


class Connections:
    """The open connections to one local port. Peers are named as by `peer_of`."""

    def __init__(self) -> None:
        self.port = 0
        """The local port, once the server listens."""
        # Asking for thousands of connections takes milliseconds. A thread of its own, because the work of callers may
        # keep all others busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="connections")

    async def traffic(self, peers: Collection[str] | None = None) -> dict[str, Traffic]:
        """Returns the traffic of those peers that are still connected, or of all."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._traffic, peers)

    async def hang_up(self, peers: Collection[str] | None = None) -> int:
        """Ends the connections of some peers, or of all: gRPC then ends their calls. Returns how many there were."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._hang_up, peers)

    def _traffic(self, peers: Collection[str] | None) -> dict[str, Traffic]:
        found = {}
        for peer, connection in self._open():
            if peers is None or peer in peers:
                with suppress(OSError, struct.error):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                    found[peer] = Traffic(*struct.unpack_from("QQ", info, ACKED_AND_RECEIVED))
        return found

    def _hang_up(self, peers: Collection[str] | None) -> int:
        ended = 0
        for peer, connection in self._open():
            if peers is None or peer in peers:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
        return ended

    def _open(self) -> Iterator[tuple[str, socket.socket]]:
        try:
            numbers = os.listdir(DESCRIPTORS)
        except OSError:
            return
        for number in numbers:
            try:
                # No duplicate: to close one of a file would release SQLite's locks on it, which belong to the process.
                connection = socket.socket(fileno=int(number))
            except OSError:
                continue  # not a socket, or closed meanwhile
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self.port:
                    host, port = connection.getpeername()[:2]
                    yield f"{host.removeprefix(MAPPED)}:{port}", connection
            except OSError:
                pass  # closed meanwhile
            finally:
                connection.detach()  # it stays gRPC's


def peer_of(text: str) -> str:
    """Returns HOST:PORT for a peer in gRPC's words, such as ipv4:127.0.0.1:5000 or ipv6:%5B::1%5D:5000."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return f"{host.strip('[]').removeprefix(MAPPED)}:{port}"
