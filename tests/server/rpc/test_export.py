"""Export: everything stored, once, for authorized callers, at the pace of the reader."""

import hashlib
import sqlite3
import time
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest

from histospec.server.rpc.export import MOST, PIECE
from histospec.server.stores.interface import Problem, Record
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.v1 import draft_pb2 as pb
from tests.support.contents import BATCHES, STATE, content, fill, logprobs, on_disk, tokens
from tests.support.exports import begin, export, problems, refused
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Peak, Server, Starter, with_tokens
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

TOKENS: dict[str, dict[str, list[str]]] = {
    "operator": {"rights": ["admin"]},
    "team": {"namespaces": ["team-*"], "rights": ["read", "write", "admin"]},
    "worker": {"rights": ["read", "write"]},
}
LARGE = 60_000  # tokens of a response of 1 MB, with its logprobs


@pytest.fixture
def filled(start_server: Starter, tmp_path: Path) -> Server:
    """Returns a server on a store with a little of every kind of data."""
    store = on_disk(tmp_path, "filled")
    fill(store)
    store.close()
    return start_server(name="filled")


def test_an_export_has_everything_that_is_stored_once(filled: Server, connect: Connector, tmp_path: Path) -> None:
    messages = export(connect(filled.endpoint).stub)
    start, end = messages[0].start, messages[-1].end
    filled.stop()
    store = on_disk(tmp_path, "filled")
    expected, learned = content(store)
    assert problems(messages) == {problem: list(map(sent, records)) for problem, records in expected.items()}
    assert {m.namespace: m.estimator for m in messages if m.estimator} == learned == {"run": STATE}
    assert {n.namespace: n.newest_epoch for n in start.namespaces} == store.newest_epochs()
    store.close()
    assert (start.shard, start.shared) == (filled.endpoint, False)
    assert (end.problems, end.responses, end.damaged) == (4, 7, 0)
    assert not any(message.HasField("start") for message in messages[1:])
    assert not any(message.HasField("end") for message in messages[:-1])


def sent(record: Record) -> Record:
    """A reward travels as float32."""
    return record if record.reward is None else record._replace(reward=float(np.float32(record.reward)))


def test_problems_come_in_the_order_that_is_promised(wire: Wire) -> None:
    for number in range(40):
        name = f"{chr(0x41 + number * 997)} {number}" if number % 2 else ""
        wire.ingest([number], [[1]], problem=name)
    found = list(problems(export(wire.stub)))
    order = [(p.name, b"" if p.name else hashlib.blake2b(p.prompt, digest_size=8).digest()) for p in found]
    assert len(order) == 40
    assert all(a < b for a, b in pairwise(order))


def test_a_large_problem_comes_in_several_messages(wire: Wire) -> None:
    texts = [[number] * LARGE for number in range(6)]
    for number, text in enumerate(texts):
        response = pb.Response(tokens=wire.i32(text), logprobs=logprobs(LARGE))
        wire.stub.Ingest(pb.IngestRequest(namespace="run", prompt=wire.i32([1]), responses=[response], epoch=number))
    wire.ingest([2], [[5]])
    messages = export(wire.stub)
    assert max(message.ByteSize() for message in messages) < PIECE + 8 * LARGE + 1000
    assert sum(part.continued for message in messages for part in message.problems) == 5
    found = problems(messages)
    assert [record.tokens for record in found[Problem("run", tokens(1))]] == [wire.i32(text) for text in texts]
    assert [record.tokens for record in found[Problem("run", tokens(2))]] == [tokens(5)]


def test_namespaces_are_chosen_by_a_pattern(filled: Server, connect: Connector) -> None:
    stub = connect(filled.endpoint).stub
    messages = export(stub, "oth*")
    assert [one.namespace for one in messages[0].start.namespaces] == ["other ❤"]
    assert {problem.namespace for problem in problems(messages)} == {"other ❤"}
    assert [message.HasField("end") for message in export(stub, "absent")] == [False, True]


@pytest.fixture
def guarded(start_server: Starter, tmp_path: Path) -> Server:
    """Returns a server that asks for tokens, with two namespaces."""
    store = on_disk(tmp_path, "guarded")
    for namespace in ("team-a", "secret"):
        batch = BATCHES[0]
        store.append(batch._replace(problem=batch.problem._replace(namespace=namespace))).result()
    store.close()
    return start_server(*with_tokens(tmp_path, **TOKENS), name="guarded")


def test_an_export_needs_the_right_to_admin_wherever_its_pattern_may_lead(guarded: Server, connect: Connector) -> None:
    stub = connect(guarded.endpoint).stub

    def names(who: str, pattern: str) -> list[str]:
        start = export(stub, pattern, f"{who}-secret-0123456789")[0].start
        return [one.namespace for one in start.namespaces]

    def refusal(who: str | None, pattern: str) -> tuple[grpc.StatusCode, str]:
        return refused(begin(stub, pattern, who and f"{who}-secret-0123456789"))

    assert names("operator", "") == ["secret", "team-a"]
    assert names("team", "team-*") == ["team-a"]
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert refusal("team", "") == (denied, "token 'team' has no right to admin in namespace '*'")
    assert refusal("team", "s*") == (denied, "token 'team' has no right to admin in namespace 's*'")
    assert refusal("worker", "team-a") == (denied, "token 'worker' has no right to admin")
    assert refusal(None, "")[0] is grpc.StatusCode.UNAUTHENTICATED
    assert refusal("stranger", "")[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_pattern_that_looks_covered_leads_no_further(
    start_server: Starter, tmp_path: Path, connect: Connector
) -> None:
    """As text, `*` is one character, which `?` matches."""
    server = start_server(*with_tokens(tmp_path, **TOKENS | {"team": {**TOKENS["team"], "namespaces": ["?"]}}))
    stub = connect(server.endpoint).stub
    for namespace in ("a", "secret"):
        request = pb.ImportRequest(
            namespace=namespace,
            problems=[pb.StoredProblem(prompt=tokens(1), responses=[pb.Response(tokens=tokens(2))])],
        )
        stub.Import(request, metadata=(("authorization", "Bearer operator-secret-0123456789"),))
    messages = export(stub, "*", "team-secret-0123456789")
    assert {problem.namespace for problem in problems(messages)} == {"a"}
    assert [one.namespace for one in messages[0].start.namespaces] == ["a"]


@pytest.fixture
def large(start_server: Starter, connect: Connector) -> Server:
    """Returns a server that stores 48 MB, and whose index is full, so that it does not grow during a test."""
    server = start_server("--memory", "16MiB")
    wire = connect(server.endpoint)
    for number in range(96):
        response = pb.Response(tokens=wire.i32([number] * LARGE), logprobs=logprobs(LARGE))
        request = pb.IngestRequest(namespace="run", prompt=wire.i32([number]), responses=[response])
        wire.stub.Ingest(request)
    return server


def test_an_export_that_is_not_read_holds_little(large: Server, connect: Connector) -> None:
    wire = connect(large.endpoint)
    export(wire.stub, "absent")
    peak = Peak(large.pid)
    calls = [begin(wire.stub) for _ in range(MOST)]
    for call in calls:
        assert next(call).HasField("start")
    time.sleep(1.0)  # time in which a server that ignored its readers would read everything
    wire.history([1])  # others are served meanwhile
    assert peak.grown() < 24 << 20, "an export of 48 MB fills the server's memory"
    for call in calls:
        assert len(problems(call)) == 96
    assert peak.grown() < 24 << 20


def test_more_exports_than_a_shard_serves_are_told_to_come_back(large: Server, connect: Connector) -> None:
    wire = connect(large.endpoint)
    calls = [begin(wire.stub) for _ in range(MOST)]
    for call in calls:
        next(call)
    code, said = refused(begin(wire.stub))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert said == f"{MOST} exports are running, the limit of this shard; retry when one has ended"
    calls[0].cancel()  # frees a slot

    def another() -> bool:
        return next(begin(wire.stub)).HasField("start") is True

    eventually(another, "a cancelled export stays", grpc.RpcError)
    eventually(lambda: "an export ended early" in [entry["event"] for entry in large.log], "the log does not say so")
    assert "rpc failed" not in [entry["event"] for entry in large.log]


def test_a_drain_ends_exports(large: Server, connect: Connector) -> None:
    call = begin(connect(large.endpoint).stub)
    next(call)
    large.terminate()
    eventually(lambda: any(entry["event"] == "draining" for entry in large.log))
    assert refused(call) == (grpc.StatusCode.UNAVAILABLE, "the server is draining; retry when it is back")
    assert large.wait() == 0


def test_a_token_that_is_taken_back_ends_its_export(start_server: Starter, tmp_path: Path, connect: Connector) -> None:
    server = start_server(*with_tokens(tmp_path, **TOKENS))
    stub = connect(server.endpoint).stub
    held = [pb.Response(tokens=tokens(*[1] * LARGE), epoch=0)]
    for number in range(64):
        request = pb.ImportRequest(namespace="run", problems=[pb.StoredProblem(prompt=tokens(number), responses=held)])
        stub.Import(request, metadata=(("authorization", "Bearer operator-secret-0123456789"),))
    call = begin(stub, "", "operator-secret-0123456789")
    next(call)
    with_tokens(tmp_path, worker=TOKENS["worker"])

    def gone() -> bool:
        try:
            stub.Topology(pb.TopologyRequest(), metadata=(("authorization", "Bearer operator-secret-0123456789"),))
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
        return False

    eventually(gone, "the server does not read its tokens again")
    assert refused(call)[0] is grpc.StatusCode.UNAUTHENTICATED


def test_damaged_responses_are_left_out_and_counted(start_server: Starter, tmp_path: Path, connect: Connector) -> None:
    store = on_disk(tmp_path, "damaged")
    fill(store)
    store.close()
    with sqlite3.connect(tmp_path / "damaged" / FILE_NAME) as connection:
        connection.execute("UPDATE responses SET tokens = zeroblob(8) WHERE seed = 0")
    connection.close()
    messages = export(connect(start_server(name="damaged").endpoint).stub)
    assert (messages[-1].end.responses, messages[-1].end.damaged) == (6, 1)
    assert sum(map(len, problems(messages).values())) == 6


def test_shards_that_share_a_store_say_so(
    start_server: Starter, connect: Connector, redis_server: RedisProcess
) -> None:
    server = start_server("--store", redis_server.url)
    wire = connect(server.endpoint)
    wire.ingest([1], [[2], [3]], epoch=4)
    messages = export(wire.stub)
    assert messages[0].start.shared is True
    assert {p: [r.tokens for r in records] for p, records in problems(messages).items()} == {
        Problem("run", tokens(1)): [tokens(2), tokens(3)]
    }
