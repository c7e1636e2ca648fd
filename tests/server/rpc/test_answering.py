"""Answers: no caller takes all places and all memory for them."""

import asyncio

import pytest

from histospec.native import Engine
from histospec.server.errors import LimitExceeded
from histospec.server.history.counts import Counts
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.answering import (
    LARGE_WAITING_EACH,
    MADE_FOR_CONNECTION,
    MAX_UNREAD,
    MAX_UNREAD_EACH,
    Answering,
)
from histospec.server.rpc.connections import Connections, peer_of
from tests.support.waiting import until

MIB = 1 << 20


class Peer:
    """A caller that reads its answers when the test says so."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.reads = asyncio.Event()
        self.answers = 0

    def peer(self) -> str:
        return f"ipv4:10.0.0.1:{self._number}"

    async def write(self, data: bytes) -> None:
        self.answers += 1
        await self.reads.wait()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Engine(namespace_tokens=0), Counts())


@pytest.mark.asyncio
async def test_one_caller_does_not_take_all_large_answers(metrics: Metrics) -> None:
    answering, mine, other = Answering(Connections(), metrics), Peer(1), Peer(2)
    asking: list[asyncio.Task[None]] = []

    async def made() -> bytes:
        return b"a large answer"

    async def ask() -> None:
        await answering.write_large(mine, "a", made)

    asking = [asyncio.ensure_future(ask()) for _ in range(LARGE_WAITING_EACH + 1)]
    await asyncio.sleep(0.05)
    assert mine.answers == 1
    with pytest.raises(LimitExceeded, match="calls of this token or host already wait for large answers"):
        await ask()
    other.reads.set()
    await asyncio.wait_for(answering.write_large(other, "b", made), 60)
    assert (mine.answers, other.answers) == (1, 1)
    mine.reads.set()
    await asyncio.gather(*asking)
    assert metrics.registry.get_sample_value("histospec_caller_limits_total", {"limit": "answers"}) == 1


@pytest.mark.asyncio
async def test_one_connection_does_not_take_the_memory_of_all(metrics: Metrics) -> None:
    answering, mine, other = Answering(Connections(), metrics), Peer(1), Peer(2)
    size = 256 << 10
    writing = [asyncio.ensure_future(answering.write(mine, bytes(size))) for _ in range(2 * MAX_UNREAD_EACH // size)]
    await asyncio.sleep(0.05)
    assert mine.answers == MAX_UNREAD_EACH // size < MAX_UNREAD // size
    other.reads.set()
    await asyncio.wait_for(answering.write(other, bytes(size)), 60)
    assert mine.answers == MAX_UNREAD_EACH // size
    mine.reads.set()
    await asyncio.gather(*writing)


@pytest.mark.asyncio
async def test_no_answer_is_made_for_a_connection_that_has_no_memory_for_it(metrics: Metrics) -> None:
    """It would wait in memory. Calls of other connections are answered meanwhile."""
    answering, mine, other = Answering(Connections(), metrics), Peer(1), Peer(2)
    size = 256 << 10
    made = 0

    async def ask(peer: Peer, caller: str) -> None:
        nonlocal made
        async with answering.turn("History", caller, peer_of(peer.peer())):
            await asyncio.sleep(0.001)
            made += 1
        await answering.write(peer, bytes(size), waits=False)

    asking = [asyncio.ensure_future(ask(mine, "a")) for _ in range(200)]
    await until(lambda: mine.answers >= MAX_UNREAD_EACH // size, "the connection is not filled")
    other.reads.set()
    await asyncio.wait_for(ask(other, "b"), 60)
    assert made - other.answers <= MAX_UNREAD_EACH // size + MADE_FOR_CONNECTION
    mine.reads.set()
    await asyncio.gather(*asking)
    assert mine.answers == 200
