"""The governor refuses the largest messages that arrive, and never one that arrives alone."""

import asyncio
from collections.abc import Collection

import pytest

from histospec.native import Engine
from histospec.server.errors import HistoSpecError
from histospec.server.history.counts import Counts
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.arrivals import ArrivingCall
from histospec.server.rpc.connections import Connections, Traffic
from histospec.server.rpc.governor import COPIES, Arriving, Governor

MIB = 1 << 20
LARGEST = 64 * MIB


class Kernel(Connections):
    """Connections of which the test says how much they have received."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, int] = {}
        self.asked = 0

    async def traffic(self, peers: Collection[str]) -> dict[str, Traffic]:
        self.asked += 1
        return {peer: Traffic(0, received) for peer, received in self.received.items() if peer in peers}


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


async def arrive(sizes: dict[str, int], held: int, calls: list[Arriving]) -> tuple[set[Arriving], Kernel, Metrics]:
    """Messages arrive in so many bytes per peer while the process holds `held`. Returns the refused calls."""
    kernel, memory = Kernel(), Memory()
    metrics = Metrics(Engine(namespace_tokens=0), Counts())
    governor = Governor(kernel, lambda: calls, memory.accounted, LARGEST, metrics)
    kernel.received = dict.fromkeys(sizes, 1000)
    watching = asyncio.ensure_future(governor.run())
    try:
        memory.messages = COPIES * LARGEST // 2 + 8 * MIB  # it looks from here on
        while not kernel.asked and held > memory.messages:
            await asyncio.sleep(0.01)
        kernel.received = {peer: 1000 + size for peer, size in sizes.items()}
        memory.messages = held
        now = kernel.asked
        while kernel.asked < now + 3 and held > COPIES * LARGEST // 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
    finally:
        watching.cancel()
    refused = {
        call
        for call in calls
        if (call.refused.done() if isinstance(call, ArrivingCall) else call.refused)  # type: ignore[attr-defined]
    }
    return refused, kernel, metrics


MUCH = COPIES * LARGEST + 32 * MIB


@pytest.mark.asyncio
async def test_a_message_that_arrives_alone_is_never_refused() -> None:
    """It decodes to several copies, beside steps of workers."""
    calls: list[Arriving] = [ArrivingCall("large"), *(ArrivingCall(f"small {number}") for number in range(50))]
    sizes = {call.peer: 20_000 for call in calls} | {"large": 62 * MIB}
    refused, _, metrics = await arrive(sizes, MUCH, calls)
    assert refused == set()
    assert metrics.registry.get_sample_value("histospec_caller_limits_total", {"limit": "arriving"}) == 0


@pytest.mark.asyncio
async def test_of_many_messages_the_largest_are_refused() -> None:
    large: list[Arriving] = [ArrivingCall(f"large {number}") for number in range(4)]
    small: list[Arriving] = [ArrivingCall(f"small {number}") for number in range(4)]
    sizes = {call.peer: 50 * MIB for call in large} | {call.peer: 4 * MIB for call in small}
    refused, _, metrics = await arrive(sizes, MUCH, large + small)
    assert len(refused) == 3
    assert refused <= set(large)
    assert metrics.registry.get_sample_value("histospec_caller_limits_total", {"limit": "arriving"}) >= 3  # type: ignore[operator]


@pytest.mark.asyncio
async def test_messages_are_not_refused_for_memory_that_others_take() -> None:
    """The engine merges segments."""
    calls: list[Arriving] = [ArrivingCall(f"{number}") for number in range(8)]
    refused, _, _ = await arrive({call.peer: 4 * MIB for call in calls}, 4 * MUCH, calls)
    assert refused == set()


@pytest.mark.asyncio
async def test_a_stream_is_not_refused_for_another_call_of_its_connection() -> None:
    stream, ingest, other = Stream("a"), ArrivingCall("a"), Stream("b")
    refused, _, _ = await arrive({"a": 150 * MIB, "b": 60 * MIB}, MUCH, [stream, ingest, other])
    assert refused == {ingest}
    refused, _, _ = await arrive({"a": 60 * MIB, "b": 150 * MIB}, MUCH, [stream, ArrivingCall("a"), other])
    assert refused == {other}
