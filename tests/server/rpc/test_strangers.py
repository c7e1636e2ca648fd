"""Health and reflection, which need no token, cost a bounded amount of memory and time."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from histospec.server.rpc.strangers import AT_A_TIME, MESSAGE_BYTES, SECONDS, WAITING
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
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
    assert peak(server) - before < 12 * LONG


def test_a_call_that_sends_nothing_gives_its_turn_back(server: Server, wire: Wire) -> None:
    """
    1. Calls without messages have all turns of this host, and the others wait.
    2. They get an error after a while, and the next ones have their turn.
    """
    silent = wire.channel.stream_stream("/grpc.health.v1.Health/Check", None, None)
    over = Latch()
    calls = [silent(nothing(over), timeout=300) for _ in range(AT_A_TIME)]
    try:
        started = time.monotonic()
        health = health_pb2_grpc.HealthStub(wire.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=100).status == SERVING
        assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert time.monotonic() - started > SECONDS / 2  # it did wait
    finally:
        over.set()


def test_a_host_that_has_too_many_calls_waiting_is_refused(server: Server, wire: Wire) -> None:
    silent = wire.channel.stream_stream("/grpc.health.v1.Health/Check", None, None)
    over = Latch()
    calls = [silent(nothing(over), timeout=300) for _ in range(2 * WAITING)]
    refused = sum(call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED for call in calls[WAITING:])
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
        next(stub.Watch(health_pb2.HealthCheckRequest(service="a" * MESSAGE_BYTES)))
    assert long.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "histospec.v1.DraftService" in ProtoReflectionDescriptorDatabase(wire.channel).get_services()
