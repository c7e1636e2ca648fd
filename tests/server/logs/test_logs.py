"""Log lines that unauthenticated peers can cause."""

from collections.abc import Sequence

import grpc
import pytest

from histospec.server.logs.lines import Throttle, request_id
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server
from tests.support.wires import Wire


def test_some_lines_pass_and_the_rest_is_counted() -> None:
    throttle = Throttle(lines=3, seconds=10.0)
    assert [throttle.admits("a", now=0.1 * i) for i in range(5)] == [{}, {}, {}, None, None]
    assert throttle.admits("b", now=1.0) == {}  # another kind
    assert throttle.admits("a", now=9.9) is None
    assert throttle.admits("a", now=10.0) == {"left_out": 3}
    assert [throttle.admits("a", now=11.0) for _ in range(3)] == [{}, {}, None]
    assert throttle.admits("b", now=12.0) == {}  # none of its lines was left out


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("step-17/worker:3", "step-17/worker:3"),
        ('a "b"\\ {c}', "abc"),
        ("x" * 10_000, "x" * 64),
    ],
)
def test_a_request_is_named_as_its_caller_says_in_few_harmless_characters(given: str, shown: str) -> None:
    assert request_id([("other", "y"), ("x-request-id", given)]) == shown


@pytest.mark.parametrize("metadata", [[], [("x-request-id", "")], [("x-request-id", '"""')], [("x-request-id", b"1")]])
def test_a_request_without_a_name_gets_one_of_its_own(metadata: Sequence[tuple[str, str | bytes]]) -> None:
    first, second = request_id(metadata), request_id(metadata)
    assert len(first) == len(second) == 12
    assert first != second


def test_every_line_of_a_call_carries_its_request(server: Server, wire: Wire) -> None:
    request = pb.IngestRequest(namespace="run", prompt=wire.i32([1]), responses=[pb.Response(tokens=wire.i32([2, 3]))])
    wire.stub.Ingest(request, metadata=(("x-request-id", "first"),))
    with pytest.raises(grpc.RpcError):
        wire.stub.Ingest(pb.IngestRequest(namespace=""), metadata=(("x-request-id", "second"),))
    (ingested,), (refused,), (stored,) = (server.logged(event) for event in ("ingested", "rpc refused", "stored"))
    assert ingested["request_id"] == "first"
    said = {key: ingested[key] for key in ("namespace", "epoch", "responses", "tokens")}
    assert said == {"namespace": "run", "epoch": 0, "responses": 1, "tokens": 2}
    assert refused["request_id"] == "second"
    assert stored["responses"] == 1
    assert "request_id" not in stored  # it covers many requests


def test_one_line_a_stream_says_what_became_of_it(server: Server, wire: Wire) -> None:
    stream = wire.stream()
    stream.ask(opens=[wire.open(1), wire.open(2, namespace="other")], step=wire.step([1, 2], [[5], [6, 7]]))
    step = wire.step([1], [[8]], [1])
    step.late = 1
    stream.ask(step=step, closes=[wire.commit(1, 2)])
    stream.end()
    (line,) = server.logged("draft stream ended")
    expected = {
        "outcome": "ok",
        "namespaces": 2,
        "open_sessions": 1,
        "messages": 2,
        "steps": 2,
        "late": 1,
        "tokens": 4,
        "drafted": 0,
        "opened": 2,
        "committed": 1,
        "refused": 0,
    }
    assert {key: line[key] for key in expected} == expected
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert len(line["request_id"]) == 12
    assert line["seconds"] > 0
