"""A worker that vanishes without closing its connection."""

import signal
import sys

from tests.support.children import Child
from tests.support.servers import Server

WORKER = """
import queue, sys, grpc
from histospec.v1 import draft_pb2 as pb, draft_pb2_grpc as pb_grpc
requests = queue.Queue()
opening = pb.OpenSession(session=1, namespace="run", prompt=b"1234")
requests.put(pb.DraftRequest(sequence=1, opens=[opening], step=pb.Step()))
stream = pb_grpc.DraftServiceStub(grpc.insecure_channel(sys.argv[1])).Draft(iter(requests.get, None))
next(stream)
print("open", flush=True)
next(stream)
"""


def test_the_stream_of_a_worker_that_stopped_answering_ends(server: Server) -> None:
    """A stopped process keeps its connection open but answers no ping, like a machine without its network."""
    with Child(sys.executable, "-c", WORKER, server.endpoint) as worker:
        worker.wait_for("open")
        assert server.metrics()["histospec_sessions"] == 1
        worker.send_signal(signal.SIGSTOP)
        [ended] = server.logged("draft stream ended")
        assert ended["open_sessions"] == 1
        assert server.metrics()["histospec_sessions"] == 0
        assert server.metrics()["histospec_streams"] == 0
