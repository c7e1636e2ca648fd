"""A worker whose process has no file descriptor left goes on without drafts, and drafts again when it has some."""

import subprocess
import sys

import pytest

from tests.support.servers import Server
from tests.support.waiting import SECONDS

WORKER = """
import os, resource, sys
from histospec.client import DraftClient, Response

with DraftClient(sys.argv[1], namespace="run-1", deadline=10) as other:
    other.ingest([1, 2, 3], [Response(list(range(40)))])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
client = DraftClient(sys.argv[1], namespace="run-1", deadline=10)
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
if sys.argv[2] == "one left":  # for the selector of an event loop, and none for its sockets
    os.close(held.pop())
(session,) = client.open([[1, 2, 3]])
print(client.step([session], [[0]])[0].tokens.tolist(), client.step([session], [[1]])[0].tokens.tolist())
for descriptor in held:
    os.close(descriptor)
while not len(draft := client.step([session], [()])[0].tokens):
    pass
print(draft.tolist()[:3])
client.shutdown()
"""


@pytest.mark.parametrize("left", ["none left", "one left"])
def test_no_descriptor_is_left(server: Server, left: str) -> None:
    command = [sys.executable, "-c", WORKER, server.endpoint, left]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    assert done.stdout.splitlines() == ["[] []", "[2, 3, 4]"], done.stderr
    assert done.stderr.count("no drafts, because this process cannot have an event loop: Too many open files") == 1
    assert "Traceback" not in done.stderr
