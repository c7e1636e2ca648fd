"""A worker that vanishes without a word."""

import signal
import subprocess
import sys
import time

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


def test_the_stream_of_a_worker_that_stopped_answering_ends(server):
    """A stopped process keeps its connection open but answers no ping, as a machine does that lost its network."""
    with subprocess.Popen([sys.executable, "-c", WORKER, server.endpoint], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "open\n"
        assert server.metrics()["histospec_sessions"] == 1
        worker.send_signal(signal.SIGSTOP)
        while not (ended := [entry for entry in server.log if entry["event"] == "draft stream ended"]):
            time.sleep(0.1)
        assert ended[0]["open_sessions"] == 1
        assert server.metrics()["histospec_sessions"] == 0
        assert server.metrics()["histospec_streams"] == 0
        worker.kill()
