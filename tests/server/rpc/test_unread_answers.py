"""A client that does not read its answers: the server stops reading its stream, and continues once it reads."""

import queue
from collections.abc import Iterator

import grpc

from histospec.server.rpc.answers import OWED_ANSWERS
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.wires import Wire

MESSAGES = 3 * OWED_ANSWERS
TOKENS = 4000
# A client whose flow-control window stays small, so that answers wait at the server.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


def test_a_stream_whose_answers_are_not_read_is_not_read(server: Server, wire: Wire) -> None:
    """
    1. A client commits and never reads: the server accepts a bounded number of its messages.
    2. Another stream is served all the while.
    3. The client reads: everything is answered and stored.
    """
    with grpc.insecure_channel(server.endpoint, options=NARROW) as channel:
        text = wire.i32(range(TOKENS))
        taken: queue.SimpleQueue[int] = queue.SimpleQueue()

        def messages() -> Iterator[pb.DraftRequest]:
            for number in range(1, MESSAGES + 1):
                taken.put(number)
                step = pb.Step(
                    sessions=wire.u64([number]), positions=wire.i32([0]), lengths=wire.i32([TOKENS]), tokens=text
                )
                opens, closes = [wire.open(number, [number % 50])], [wire.commit(number, TOKENS, epoch=number // 50)]
                yield pb.DraftRequest(sequence=number, opens=opens, step=step, closes=closes)

        answers = pb_grpc.DraftServiceStub(channel).Draft(messages(), timeout=300)
        stored = "histospec_ingested_responses_total"

        def stands() -> bool:
            """Returns whether the server accepts no more."""
            before = server.metrics()[stored]
            wire.stream().ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
            for _ in range(20):
                server.metrics()
            return before == server.metrics()[stored] > 0

        eventually(stands, "the stream is read on and on")
        assert server.metrics()[stored] < MESSAGES
        assert sorted(answer.sequence for answer in answers) == list(range(1, MESSAGES + 1))
        assert server.metrics()[stored] == MESSAGES
