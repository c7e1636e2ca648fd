"""A server whose store is not open yet: it listens, drafts from running sessions, and loses nothing."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from histospec.client import DraftClient, Response
from histospec.v1 import draft_pb2 as pb
from tests.support.clients import flushed, texts
from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

TEXT = list(range(100, 140))
OLDER = list(range(200, 240))
EPOCH = 7


def waits_for(server: Server, what: str) -> bool:
    status, text = server.get("/readyz")
    return status == 503 and text.startswith(f"store: {what}")


def health(wire: Wire) -> int:
    request = health_pb2.HealthCheckRequest(service="histospec.v1.DraftService")
    return int(health_pb2_grpc.HealthStub(wire.channel).Check(request).status)


def assert_it_is_opening(server: Server, wire: Wire) -> None:
    """The server is alive but not ready, refuses what needs the store, and drafts from siblings."""
    assert server.get("/livez")[0] == 200
    assert health(wire) == health_pb2.HealthCheckResponse.NOT_SERVING
    prompt = wire.i32([1, 2, 3])
    calls = (
        lambda: wire.ingest([1, 2, 3], [TEXT]),
        lambda: wire.history([1, 2, 3]),
        lambda: wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run")),
        lambda: wire.stub.Rewind(pb.RewindRequest(namespace="run", epoch=0)),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError, match="not open yet") as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert wire.stub.PredictLength(pb.PredictLengthRequest(namespace="run", prompt=prompt)).observations == 0
    stream = wire.stream()
    first = stream.ask(opens=[wire.open(1), wire.open(2)], step=wire.step([1, 2], [TEXT[:20], TEXT[:8]]))
    assert wire.unknown(first) == []
    again = stream.ask(step=wire.step([1, 2], [[], TEXT[8:10]], [20, 8]))
    assert wire.drafts(again)[1][:4] == TEXT[10:14]
    [refusal] = stream.ask(closes=[wire.commit(1, 20)]).refusals
    assert (refusal.session, refusal.later) == (1, True)
    assert "not open yet" in refusal.reason
    stream.end()


def write(client: DraftClient, text: list[int]) -> None:
    sessions = client.open([[1, 2, 3]])
    client.step(sessions, [text])
    client.finish(sessions)


@pytest.mark.parametrize("kind", ["away", "hangs"])
def test_a_server_that_starts_while_redis_is_away_waits_for_it(
    start_server: Starter, connect: Connector, own_redis: RedisProcess, kind: str
) -> None:
    """
    1. Redis has a response of epoch 7, and ends or hangs. A server starts.
    2. The server listens and drafts from siblings. It refuses a client's commits for now, and the client keeps them.
    3. Redis is back: the server is ready, reads the problem of a session that opened before, and accepts the kept
       commits. They count for epoch 7, which the server did not know when the session ended.
    """
    with DraftClient(start_server("--store", own_redis.url).endpoint, "run", deadline=5.0) as client:
        client.ingest([1, 2, 3], [Response(OLDER)], epoch=EPOCH)
        client.ingest([9], [Response(OLDER)], epoch=EPOCH)
    own_redis.kill() if kind == "away" else own_redis.pause()

    server = start_server("--store", own_redis.url, ready=False)
    wire = connect(server.endpoint)
    eventually(lambda: waits_for(server, f"{own_redis.url}/0 does not answer ("), "it does not say what it waits for")
    assert_it_is_opening(server, wire)
    waiting = wire.stream()
    waiting.ask(opens=[wire.open(5, [9])], step=wire.step([5], [OLDER[:10]]))
    with DraftClient(server.endpoint, "run", deadline=5.0) as client:
        write(client, TEXT)
        assert flushed(client, 0.5).pending_commits == 1

        own_redis.start() if kind == "away" else own_redis.go_on()
        eventually(lambda: server.get("/readyz")[0] == 200, "it is not ready with its Redis")
        assert health(wire) == health_pb2.HealthCheckResponse.SERVING
        eventually(lambda: flushed(client).commits == 1, "what the client kept does not arrive")
        assert (client.stats().dropped_commits, client.stats().pending_commits) == (0, 0)
        stored = client.history([1, 2, 3])
    assert texts(stored) == [OLDER, TEXT]
    assert [response.epoch for response in wire.stub.History(
        pb.HistoryRequest(namespace="run", prompt=wire.i32([1, 2, 3]))
    ).responses] == [EPOCH, EPOCH]  # fmt: skip
    eventually(
        lambda: wire.drafts(waiting.ask(step=wire.step([5], [[]], [10])))[0][:4] == OLDER[10:14],
        "a session that was opened before does not find its problem",
    )
    eventually(lambda: server.metrics()["histospec_history_tokens"] == 3 * len(TEXT), "something is indexed twice")
    assert server.metrics()["histospec_store_errors_total"] == 0
    assert len(server.logged("the store answers")) == len(server.logged("does not answer")) == 1


def test_a_cluster_and_a_name_that_are_not_there_yet_are_waited_for(start_server: Starter, tmp_path: Path) -> None:
    require_redis()
    cluster = RedisCluster(tmp_path / "cluster")
    try:
        for node in cluster.nodes:
            node.kill()
        server = start_server("--store", cluster.url, ready=False)
        nowhere = start_server("--store", "redis://nowhere.invalid", ready=False)
        eventually(lambda: waits_for(server, "redis+cluster://"))
        eventually(lambda: "does not answer" in server.get("/readyz")[1])
        eventually(lambda: "does not answer" in nowhere.get("/readyz")[1])
        for node in cluster.nodes:
            node.start()
        cluster.recovers()
        eventually(lambda: server.get("/readyz")[0] == 200, "it does not find its Cluster")
        nowhere.drain()
    finally:
        cluster.kill()


def test_a_server_that_waits_for_its_store_stops_when_told(start_server: Starter, connect: Connector) -> None:
    server = start_server("--store", "redis://127.0.0.1:1", ready=False)
    eventually(lambda: waits_for(server, "redis://127.0.0.1:1/0 does not answer"))
    assert_it_is_opening(server, connect(server.endpoint))
    server.drain()
    assert [entry["event"] for entry in server.log][-1] == "stopped"
    # The estimator is not saved: the store may have a better one.
    [warning] = [entry["event"] for entry in server.log if entry.get("level") in ("warning", "error")]
    assert "does not answer" in str(warning)


def test_a_wrong_password_ends_the_server_at_once(
    start_server: Starter, start_redis: Callable[..., RedisProcess]
) -> None:
    redis = start_redis("--requirepass", "right-one", password="right-one")
    with pytest.raises(RuntimeError, match="the server ended with 2") as ended:
        start_server("--store", f"redis://:wrong-one@{redis.where}")
    assert f"--store redis://{redis.where}/0: invalid username-password pair" in str(ended.value)
    assert "wrong-one" not in str(ended.value)


def test_a_store_that_turns_out_to_be_unusable_ends_the_server_later_too(
    start_server: Starter, own_redis: RedisProcess
) -> None:
    own_redis.kill()
    server = start_server("--store", own_redis.url, ready=False)
    eventually(lambda: waits_for(server, f"{own_redis.url}/0 does not answer"))
    own_redis.options, own_redis.password = ("--requirepass", "other"), "other"
    own_redis.start()
    assert server.wait() == 2
    assert f"--store {own_redis.url}/0: " in str(server.log[-1]["event"])
    assert "give a valid user and password" in str(server.log[-1]["event"])
