"""The connections of a port, found among all descriptors of the process."""

import fcntl
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from histospec.server.rpc.connections import Connections

TAKES_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def lockable(file: Path) -> bool:
    """Returns whether another process can lock a file."""
    return subprocess.run([sys.executable, "-c", TAKES_LOCK, str(file)], capture_output=True).returncode == 0


@pytest.mark.asyncio
async def test_looking_for_connections_keeps_the_locks_of_files(tmp_path: Path) -> None:
    """SQLite's locks: without them, another process takes itself for the only one and deletes the write-ahead log."""
    file = tmp_path / "locked"
    file.touch()
    with file.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        assert not lockable(file)
        await Connections().traffic()
        await Connections().hang_up(set())
        assert not lockable(file)


@pytest.mark.asyncio
async def test_traffic_is_counted_and_connections_end() -> None:
    connections = Connections()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        connections.port = listening.getsockname()[1]
        with closing(socket.create_connection(listening.getsockname())) as caller:
            accepted, _ = listening.accept()
            caller.sendall(bytes(1000))
            assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
            peer = f"127.0.0.1:{caller.getsockname()[1]}"
            assert {name: traffic.received for name, traffic in (await connections.traffic()).items()} == {peer: 1000}
            assert await connections.traffic(set()) == {}
            assert os.fstat(accepted.fileno())
            assert await connections.hang_up({peer}) == 1
            assert caller.recv(1) == b""
            accepted.close()
