"""A client that does not read its answers: the server stops reading its stream, and continues once it reads."""

import asyncio
import queue
from collections.abc import Iterator
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from histospec.server.rpc.answers import OWED_ANSWERS, OWED_BYTES, Answers, Commit
from histospec.server.stores.interface import WAITING_BYTES
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc
from tests.support.batches import batch
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


@pytest.mark.asyncio
async def test_small_responses_that_wait_for_the_store_count_with_the_memory_that_each_takes() -> None:
    stored = asyncio.get_running_loop().create_future()

    async def commit(*_: object) -> object:
        return await stored

    answers = Answers(Mock(write=AsyncMock()), Mock(commit=commit), Mock(), Mock(), Mock())
    for number in range(4):
        answer = answers.begin(number, 0.0)
        answer.commits.extend([Commit(1, batch(b"aaaa"), 0, Mock())] * (OWED_BYTES // WAITING_BYTES // 4))
        await answers.finish(answer, wanted=True)
    room = asyncio.ensure_future(answers.room())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not room.done()
    stored.set_result(batch(b"aaaa"))
    await room
    await answers.stored()
