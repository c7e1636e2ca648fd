"""Requests that arrive: a caller over its share waits, and others do not."""

import asyncio
from typing import Any

import pytest

from histospec.native import Engine
from histospec.server.errors import LimitExceeded
from histospec.server.history.counts import Counts
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.arrivals import LARGE, MAX_RECEIVED, MAX_RECEIVED_EACH, Arrivals, Received, sized
from histospec.v1 import draft_pb2 as pb

PAUSE = 0.5


class Call:
    """A call whose message arrives, and is handled, when the test says so."""

    def __init__(self, arrivals: Arrivals, caller: str, number: int) -> None:
        self._peer = f"ipv4:10.0.0.1:{number}"
        self._message: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._handled = asyncio.Event()
        self.read_begun = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(arrivals, caller))

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Received:
        self.read_begun.set()
        return await self._message

    async def _run(self, arrivals: Arrivals, caller: str) -> None:
        async with arrivals.receive(self, caller):
            await self._handled.wait()

    def arrive(self, size: int) -> None:
        self._message.set_result(Received("a request", size))

    async def end(self) -> None:
        self._handled.set()
        await self.task


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(Metrics(Engine(namespace_tokens=0), Counts()), pause=PAUSE)


async def begun(*calls: Call) -> list[bool]:
    """Returns which calls are being received once nothing more happens by itself."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [call.read_begun.is_set() for call in calls]


async def over(*calls: Any) -> None:
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)


@pytest.mark.asyncio
async def test_a_caller_whose_requests_are_large_waits_and_others_do_not(arrivals: Arrivals) -> None:
    large = Call(arrivals, "a", 1)
    await begun()
    large.arrive(MAX_RECEIVED_EACH + 1)
    await begun()
    mine, other = Call(arrivals, "a", 2), Call(arrivals, "b", 3)
    assert await begun(mine, other) == [False, True]
    await large.end()
    assert await begun(mine) == [True]
    other.arrive(MAX_RECEIVED + 1)
    await begun()
    third = Call(arrivals, "c", 4)
    assert await begun(third) == [False]
    await other.end()
    assert await begun(third) == [True]
    await over(mine, third)
    assert arrivals.received == 0


def test_a_request_with_many_parts_takes_more_memory_than_bytes() -> None:
    problems = [pb.ExpectedResponse(prompt=b"0000")] * 1000
    data = pb.PredictLengthsRequest(problems=problems).SerializeToString()
    received = sized(pb.PredictLengthsRequest.FromString)(data)
    assert received.size == len(data)
    assert received.memory > 10 * len(data)


@pytest.mark.asyncio
async def test_a_caller_that_reads_pauses_after_a_large_request() -> None:
    arrivals = Arrivals(Metrics(Engine(namespace_tokens=0), Counts()), pace=4 * LARGE)
    large = Call(arrivals, "a", 1)
    await begun()
    large.arrive(2 * LARGE)
    await large.end()
    mine, other = Call(arrivals, "a", 1), Call(arrivals, "b", 2)
    assert await begun(mine, other) == [False, True]
    await asyncio.wait_for(mine.read_begun.wait(), 60)
    await over(mine, other)


@pytest.mark.asyncio
async def test_a_caller_pauses_after_a_message_that_was_refused_for_memory(arrivals: Arrivals) -> None:
    refused = Call(arrivals, "a", 1)
    await begun()
    (arriving,) = arrivals.calls
    arriving.refuse(LimitExceeded("message: too many"))
    with pytest.raises(LimitExceeded, match="message: too many"):
        await refused.task
    mine, other = Call(arrivals, "a", 1), Call(arrivals, "b", 2)
    assert await begun(mine, other) == [False, True]
    await asyncio.wait_for(mine.read_begun.wait(), 60)
    await over(mine, other)
