"""Health and reflection, which need no token, cost a bounded amount of memory and time."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from histospec.native import Engine
from histospec.server.history.counts import Counts
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.arrivals import AT_ONCE_CONNECTION, Received
from histospec.server.rpc.connections import Connections
from histospec.server.rpc.interceptors import PENDING_CALLS, SHORT_BYTES, UnauthenticatedCalls
from tests.support.servers import Server
from tests.support.waiting import Latch
from tests.support.wires import Wire

SERVING = health_pb2.HealthCheckResponse.SERVING
MIB = 1 << 20
LONG = 16 * MIB
CALLS = 40


def peak(server: Server) -> int:
    """Returns the peak memory of the process in bytes."""
    with open(f"/proc/{server.pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def nothing(over: Latch) -> Iterator[bytes]:
    """Sends no message until released."""
    over.wait()
    yield from ()


@pytest.mark.parametrize(
    "path", ["/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
def test_long_messages_are_received_by_turns(server: Server, path: str) -> None:
    """Forty at once took 17 to 31 times the memory of one."""
    before = peak(server)
    with grpc.insecure_channel(server.endpoint) as channel, ThreadPoolExecutor(CALLS) as threads:
        call = channel.stream_stream(path, None, None)
        ready = threading.Barrier(CALLS, timeout=60)

        def send() -> grpc.StatusCode:
            ready.wait()
            try:
                list(call(iter([bytes(LONG)]), timeout=100))
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return grpc.StatusCode.OK

        codes = {future.result() for future in [threads.submit(send) for _ in range(CALLS)]}
    too_slow = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert codes - too_slow == {grpc.StatusCode.INVALID_ARGUMENT}
    assert peak(server) - before < 14 * LONG


def test_a_call_that_sends_nothing_gives_its_turn_back(server: Server, wire: Wire) -> None:
    """
    1. Calls without messages have all places of this connection, and the others wait.
    2. After a moment, the next ones have their turn. The calls get an error after a while.
    """
    silent = wire.channel.stream_stream("/grpc.health.v1.Health/Check", None, None)
    over = Latch()
    calls = [silent(nothing(over), timeout=300) for _ in range(AT_ONCE_CONNECTION)]
    try:
        health = health_pb2_grpc.HealthStub(wire.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=100).status == SERVING
        assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    finally:
        over.set()


class Silent:
    """A call whose message arrives when the test says so."""

    def __init__(self, peer: str) -> None:
        self._peer = f"ipv4:{peer}"
        self.message: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.received = False
        self.answer = b""

    async def write(self, answer: bytes) -> None:
        self.answer = answer

    def peer(self) -> str:
        return self._peer

    async def read(self) -> object:
        self.received = True
        return await self.message


def test_each_connection_has_its_own_turns() -> None:
    """A call is received only when an earlier one of its connection has its message."""

    async def answer(request: object, _: Any) -> object:
        return request

    async def run() -> None:
        handler: Any = grpc.unary_unary_rpc_method_handler(answer, bytes, bytes)
        metrics = Metrics(Engine(namespace_tokens=0), Counts())
        serve: Any = UnauthenticatedCalls(Answering(Connections(), metrics), metrics).serve(handler).stream_stream
        mine = [Silent("10.0.0.1:50000") for _ in range(AT_ONCE_CONNECTION + 1)]
        other = Silent("10.0.0.1:50001")
        served = [asyncio.ensure_future(serve(None, call)) for call in (*mine, other)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert [call.received for call in (*mine, other)] == [True] * AT_ONCE_CONNECTION + [False, True]
        for call in (*mine, other):
            call.message.set_result(Received(b"a message", 9))
        await asyncio.gather(*served)
        assert [call.answer for call in (*mine, other)] == [b"a message"] * len(served)
        assert mine[-1].received

    asyncio.run(run())


def test_a_host_that_has_too_many_calls_waiting_is_refused(server: Server, wire: Wire) -> None:
    silent = wire.channel.stream_stream("/grpc.health.v1.Health/Check", None, None)
    over = Latch()
    calls = [silent(nothing(over), timeout=300) for _ in range(2 * PENDING_CALLS)]
    refused = sum(call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED for call in calls[PENDING_CALLS:])
    over.set()
    assert refused > 0
    told = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}
    assert {call.code() for call in calls} <= told


def test_short_questions_are_answered(server: Server, wire: Wire) -> None:
    stub = health_pb2_grpc.HealthStub(wire.channel)
    assert stub.Check(health_pb2.HealthCheckRequest()).status == SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as long:
        next(stub.Watch(health_pb2.HealthCheckRequest(service="a" * SHORT_BYTES)))
    assert long.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "histospec.v1.DraftService" in ProtoReflectionDescriptorDatabase(wire.channel).get_services()
