"""The governor refuses the largest messages that arrive, and never one that arrives alone."""

import asyncio
from collections.abc import Collection
from typing import NamedTuple

import pytest

from histospec.native import Engine
from histospec.server.errors import HistoSpecError
from histospec.server.history.counts import Counts
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.arrivals import Arrivals, ArrivingCall
from histospec.server.rpc.connections import Connections, Traffic
from histospec.server.rpc.governor import COPIES, GROWTH, PART, Governor

MIB = 1 << 20
LARGEST = 64 * MIB
EARLIER = 1000 * MIB  # that each connection received before, in other messages


class Kernel(Connections):
    """Connections of which the test says how much they have received."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, int] = {}
        self.asked = 0

    async def traffic(self, peers: Collection[str] | None = None) -> dict[str, Traffic]:
        self.asked += 1
        return {peer: Traffic(0, received) for peer, received in self.received.items()}

    async def looks(self, number: int) -> None:
        """Waits until the governor has looked so many times."""
        until = self.asked + number
        while self.asked < until:
            await asyncio.sleep(0.01)


class Stream:
    """A Draft stream that awaits a message."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.number = 0
        self.refused: HistoSpecError | None = None

    def awaited(self) -> int | None:
        return self.number

    def refuse(self, error: HistoSpecError) -> None:
        self.refused = error


class Memory:
    """What the process holds; the governor subtracts what is accounted for, so less of it is more for messages."""

    def __init__(self) -> None:
        self.messages = 0

    def accounted(self) -> int:
        return -self.messages


class Arrival(NamedTuple):
    """A message of which `size` bytes arrive in one piece or, unless `stalled`, in several."""

    call: ArrivingCall | Stream
    size: int
    stalled: bool = False


async def arrive(messages: list[Arrival], held: int, seconds: float = 1000) -> tuple[list[bool], Metrics]:
    """Messages arrive while the process holds `held` bytes. Returns which of them are refused."""
    kernel, memory = Kernel(), Memory()
    metrics = Metrics(Engine(namespace_tokens=0), Counts())
    arrivals = Arrivals(metrics)
    streams: set[Stream] = set()
    governor = Governor(kernel, streams, [arrivals], memory.accounted, LARGEST, metrics, seconds)
    kernel.received = {message.call.peer: EARLIER for message in messages}
    watching = asyncio.ensure_future(governor.run())
    try:
        memory.messages = COPIES * LARGEST // 2 + 8 * MIB  # it looks at the connections from here on
        await kernel.looks(2)
        arrivals.calls |= {message.call for message in messages if isinstance(message.call, ArrivingCall)}
        streams |= {message.call for message in messages if isinstance(message.call, Stream)}
        for message in messages:
            kernel.received[message.call.peer] += message.size - 10 * GROWTH
        await kernel.looks(2)
        memory.messages = held
        for _ in range(10):
            for message in messages:
                if not message.stalled:
                    kernel.received[message.call.peer] += GROWTH
            await kernel.looks(1)
    finally:
        watching.cancel()
    return [is_refused(message.call) for message in messages], metrics


def is_refused(call: ArrivingCall | Stream) -> bool:
    return call.refused is not None


def waiting(peer: str) -> ArrivingCall:
    return ArrivingCall(peer, lambda: None)


def counted(metrics: Metrics, limit: str) -> float | None:
    return metrics.registry.get_sample_value("histospec_caller_limits_total", {"limit": limit})


MUCH = COPIES * LARGEST + 32 * MIB


@pytest.mark.asyncio
async def test_a_message_that_arrives_alone_is_never_refused() -> None:
    """It decodes to several copies, beside steps of workers."""
    small = [Arrival(waiting(f"small {number}"), 50_000) for number in range(50)]
    refused, metrics = await arrive([Arrival(waiting("large"), 62 * MIB), *small], MUCH)
    assert refused == [False] * 51
    assert counted(metrics, "arriving") == 0


@pytest.mark.asyncio
async def test_of_many_messages_the_largest_are_refused() -> None:
    large = [Arrival(waiting(f"large {number}"), 50 * MIB) for number in range(4)]
    small = [Arrival(waiting(f"small {number}"), 4 * MIB) for number in range(4)]
    refused, metrics = await arrive(large + small, MUCH)
    assert sum(refused[:4]) == 3
    assert refused[4:] == [False] * 4
    assert (counted(metrics, "arriving") or 0) >= 3


@pytest.mark.asyncio
async def test_messages_that_have_stalled_are_refused_first() -> None:
    stalled = [Arrival(waiting(f"stalled {number}"), 50 * MIB, True) for number in range(3)]
    refused, _ = await arrive([Arrival(waiting("whole soon"), 62 * MIB), *stalled], MUCH)
    assert refused == [False, True, True, True]


@pytest.mark.asyncio
async def test_messages_are_not_refused_for_memory_that_others_take() -> None:
    """The engine merges segments."""
    calls = [Arrival(waiting(f"{number}"), 4 * MIB) for number in range(8)]
    refused, _ = await arrive(calls, 4 * MUCH)
    assert not any(refused)


@pytest.mark.asyncio
async def test_a_stream_is_not_refused_for_another_call_of_its_connection() -> None:
    """But it is for its own message."""
    stream, ingest, other = Stream("a"), waiting("a"), Stream("b")
    refused, _ = await arrive([Arrival(stream, 150 * MIB), Arrival(ingest, 0, True), Arrival(other, 60 * MIB)], MUCH)
    assert refused == [False, True, False]
    stream, ingest, other = Stream("a"), waiting("a"), Stream("b")
    refused, _ = await arrive([Arrival(stream, 60 * MIB), Arrival(ingest, 0, True), Arrival(other, 150 * MIB)], MUCH)
    assert refused == [False, False, True]


@pytest.mark.asyncio
async def test_a_stream_waits_for_messages_but_not_for_the_rest_of_one() -> None:
    idle, half = Stream("a"), Stream("b")
    refused, metrics = await arrive([Arrival(idle, 11 * GROWTH), Arrival(half, 2 * PART)], MUCH, seconds=0.05)
    assert refused == [False, True]
    assert (counted(metrics, "late") or 0) >= 1
