"""Callers that do not send their requests whole, or read no answers, cost neither memory nor places nor the drain."""

import signal
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from histospec.server.rpc.answers import SHORT_ANSWER
from histospec.server.rpc.service import STREAMS_EACH
from histospec.specrl import rollout_cache_pb2 as specrl
from histospec.specrl import rollout_cache_pb2_grpc as specrl_grpc
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc
from tests.support.raw_http2 import RawHttp2, message
from tests.support.servers import Peak, Starter, secret, with_tokens
from tests.support.waiting import eventually
from tests.support.wires import Connector, i32

MIB = 1 << 20
SERVICE = "/histospec.v1.DraftService"
UPDATE = "/specrl.RolloutCacheService/UpdateCache"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
ENDED = 60.0  # seconds; detects a hang


@pytest.mark.parametrize("window", [0, 65_535])
@pytest.mark.parametrize("path", [WATCH, f"{SERVICE}/Topology", REFLECTION])
def test_a_peer_that_reads_nothing_does_not_hold_the_drain(start_server: Starter, path: str, window: int) -> None:
    server = start_server("--drain-seconds", "1")
    request = b"\x3a\x00" if "reflection" in path else b""  # lists services
    with closing(RawHttp2(server.endpoint, window=window)) as peer:
        peer.call(1, path, message(request))
        time.sleep(0.5)  # time in which the call arrives
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("path", [WATCH, f"{SERVICE}/Topology", REFLECTION])
def test_a_peer_that_leaves_before_it_reads_is_no_error_of_the_server(start_server: Starter, path: str) -> None:
    server = start_server()
    request = b"\x3a\x00" if "reflection" in path else b""
    for _ in range(5):
        with closing(RawHttp2(server.endpoint, window=0)) as peer:
            peer.call(1, path, message(request))
            time.sleep(0.2)  # time in which the call arrives
    server.terminate()
    assert server.wait() == 0
    assert [line for line in server.log if line["level"] not in ("info", "warning")] == []


def test_health_changes_although_a_watcher_reads_nothing(start_server: Starter) -> None:
    """A watcher from the start of the server, before it is ready, does not hold it at NOT_SERVING."""
    server = start_server()
    with closing(RawHttp2(server.endpoint, window=0)) as peer, grpc.insecure_channel(server.endpoint) as channel:
        for number in range(1, 7, 2):
            peer.call(number, WATCH, message(b""))
        check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        assert check(b"", timeout=ENDED) == b"\x08\x01"  # SERVING


def test_watches_are_bounded(start_server: Starter) -> None:
    server = start_server()
    with grpc.insecure_channel(server.endpoint) as channel:
        watch: Any = channel.unary_stream(WATCH, None, None)
        open_calls = [watch(b"", timeout=300) for _ in range(64)]
        for call in open_calls:
            assert next(call) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(b"", timeout=ENDED))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "64 watches of this host" in str(refused.value.details())
        for call in open_calls:
            call.cancel()
        name = b"\x0a" + struct.pack("B", 127) + b"x" * 127
        assert next(watch(name, timeout=ENDED)) == b"\x08\x03"  # SERVICE_UNKNOWN
        long = b"\x0a\xac\x02" + b"x" * 300
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(long, timeout=ENDED))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("connections", [1, 12])
def test_histories_that_are_not_read_take_bounded_memory(
    start_server: Starter, connect: Connector, connections: int
) -> None:
    """
    1. A reader asks for the same 24 MiB again and again, and reads nothing. Before, all answers were in memory.
    2. Another one's short history is answered meanwhile; later the large one, too.
    """
    server = start_server("--memory", "64MiB")
    wire = connect(server.endpoint)
    rng = np.random.default_rng(0)
    for _ in range(6):
        wire.ingest([1], [rng.integers(0, 50_000, MIB).tolist()])
    wire.ingest([2], [[3]])
    calls = 48
    peak = Peak(server.pid)
    peers = [RawHttp2(server.endpoint, window=0) for _ in range(connections)]
    request = message(pb.HistoryRequest(namespace="run", prompt=i32([1])).SerializeToString())
    try:
        for number in range(calls // connections):
            for peer in peers:
                peer.call(2 * number + 1, f"{SERVICE}/History", request)
        short = pb.HistoryRequest(namespace="run", prompt=i32([2]))
        assert len(wire.stub.History(short, timeout=ENDED).responses) == 1
        eventually(lambda: all(peer.closed for peer in peers), "a connection that reads nothing stays")
    finally:
        for peer in peers:
            peer.close()
    assert peak.grown() < 450 * MIB
    large = pb.HistoryRequest(namespace="run", prompt=i32([1]))
    with grpc.insecure_channel(server.endpoint, options=[("grpc.max_receive_message_length", -1)]) as channel:
        assert len(pb_grpc.DraftServiceStub(channel).History(large, timeout=ENDED).responses) == 6


@pytest.mark.parametrize("method", ["Ingest", "History", "Import", "Draft", "UpdateCache", "Check"])
def test_requests_that_are_never_whole_take_bounded_memory(
    start_server: Starter, connect: Connector, method: str
) -> None:
    """Before, each took all that it had sent: 40 MiB."""
    server = start_server("--memory", "64MiB")
    wire = connect(server.endpoint)
    path = {"UpdateCache": UPDATE, "Check": CHECK}.get(method, f"{SERVICE}/{method}")
    whole = message(bytes(40 * MIB))
    peak = Peak(server.pid)
    peers = [RawHttp2(server.endpoint) for _ in range(16)]
    try:
        for peer in peers:
            peer.call(1, path, None)
        with ThreadPoolExecutor(len(peers)) as threads:
            list(threads.map(lambda peer: peer.send(1, whole[:-1], seconds=20.0), peers))
        assert peak.grown() < 400 * MIB
        wire.ingest([1], [[2]])
        assert wire.history([1]) == [[2]]
    finally:
        for peer in peers:
            peer.close()


def test_a_stream_whose_long_answer_is_not_read_ends(start_server: Starter, connect: Connector) -> None:
    """Before, each stream kept one answer of up to 8 MiB, for as long as its peer liked."""
    server = start_server()
    wire = connect(server.endpoint)
    wire.ingest([1, 2], [list(range(300))])
    ids = list(range(1, 101))
    step = wire.step(ids, [list(range(12))] * len(ids), max_tokens=256, verify_cost=0.0)
    opens = [wire.open(session, [1, 2]) for session in ids]
    assert wire.stream().ask(opens=opens, step=step).ByteSize() > SHORT_ANSWER
    request = pb.DraftRequest(sequence=1, opens=opens, step=step)
    with closing(RawHttp2(server.endpoint, window=0)) as peer:
        peer.call(1, f"{SERVICE}/Draft", message(request.SerializeToString()), end=False)
        eventually(lambda: peer.closed, "a connection that reads nothing stays")
    eventually(lambda: server.total("histospec_caller_limits_total", limit="unread") > 0)


def test_draft_streams_are_bounded(start_server: Starter, connect: Connector) -> None:
    """Half of the streams wait until the others have begun: gRPC itself refuses some if more than 1,000 wait."""
    server = start_server()
    peers = [RawHttp2(server.endpoint) for _ in range(2)]
    calls: list[int] = []

    def begun() -> bool:
        return server.total("histospec_streams") + sum(len(peer.ended) for peer in peers) == len(calls)

    try:
        for peer in peers:
            for number in range(STREAMS_EACH // 2 + 8):
                peer.call(2 * number + 1, f"{SERVICE}/Draft", None)
                calls.append(number)
            eventually(begun, "not every stream is begun or ended")
        assert server.total("histospec_streams") == STREAMS_EACH
        assert server.total("histospec_caller_limits_total", limit="calls") == 16
    finally:
        for peer in peers:
            peer.close()
    eventually(lambda: server.total("histospec_streams") == 0)
    connect(server.endpoint).stream().ask(step=pb.Step())


def test_rights_are_checked_before_a_request_is_read(start_server: Starter, tmp_path: Path) -> None:
    """A call that its token can never make is refused although its message never arrives."""
    tokens = with_tokens(tmp_path, reader={"rights": ["read"], "namespaces": ["a"]}, writer={"rights": ["write"]})
    server = start_server(*tokens)
    refused = {"reader": ["Ingest", "Import", "Export", "DropNamespace", "Rewind"], "writer": ["Draft", "History"]}
    paths = [(name, f"{SERVICE}/{method}") for name, methods in refused.items() for method in methods]
    with closing(RawHttp2(server.endpoint)) as peer:
        for number, (name, path) in enumerate([*paths, ("reader", UPDATE)]):
            peer.call(2 * number + 1, path, None, secret(name))
        eventually(lambda: len(peer.ended) > len(paths), "a call is not refused")
    log = [line["reason"] for line in server.logged("rpc refused", 4)]  # a line for each reason
    assert "token 'reader' has no right to write" in log
    assert "token 'reader' has no right to write in namespace 'specrl'" in log


@pytest.mark.parametrize("path", [UPDATE, f"{SERVICE}/Ingest", f"{SERVICE}/Export", f"{SERVICE}/Import"])
def test_calls_that_send_headers_alone_take_no_place(start_server: Starter, connect: Connector, path: str) -> None:
    server = start_server()
    wire = connect(server.endpoint)
    with closing(RawHttp2(server.endpoint)) as peer:
        for number in range(40):
            peer.call(2 * number + 1, path, None)
        stub = specrl_grpc.RolloutCacheServiceStub(wire.channel)
        digest = xxhash.xxh64_intdigest(i32([1, 2]), seed=0)
        update = specrl.UpdateCacheRequest(
            prompt_hash=digest, prompt=specrl.TokenList(tokens=[1, 2]), responses=[specrl.TokenList(tokens=[3])]
        )
        assert stub.UpdateCache(update, timeout=ENDED).success
        wire.ingest([1], [[2]])
        assert len(list(wire.stub.Export(pb.ExportRequest(), timeout=ENDED))) >= 2
        assert wire.stub.Import(pb.ImportRequest(namespace="run"), timeout=ENDED) == pb.ImportResponse()
        assert not peer.closed
