"""A worker whose process has too few file descriptors goes on without drafts, and drafts again when it has enough.

Three are enough for an event loop. gRPC needs more, and ends the process with SIGABRT if it gets none.
"""

import subprocess
import sys

import pytest

from tests.support.servers import Server
from tests.support.waiting import SECONDS

WORKER = """
import os, resource, sys, time
from histospec.client import DraftClient, Response

with DraftClient(sys.argv[1], namespace="run-1", deadline=10) as other:
    other.ingest([1, 2, 3], [Response(list(range(40)))])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
client = DraftClient(sys.argv[1], namespace="run-1", deadline=10)
used, settled = 0, 0
while settled < 20:  # the other client's connection closes in the background
    before, used = used, len(os.listdir("/proc/self/fd"))
    settled = settled + 1 if used == before else 0
    time.sleep(0.02)
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for _ in range(int(sys.argv[2])):
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


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (0, "no drafts, because this process cannot have an event loop: Too many open files"),
        (1, "no drafts, because this process cannot have an event loop: Too many open files"),
        *((left, "cannot connect with fewer than 16 file descriptors: Too many open files") for left in (4, 8, 15)),
    ],
)
def test_few_descriptors_are_left(server: Server, left: int, said: str) -> None:
    command = [sys.executable, "-c", WORKER, server.endpoint, str(left)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    assert done.stdout.splitlines() == ["[] []", "[2, 3, 4]"], (done.returncode, done.stderr)
    assert done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
