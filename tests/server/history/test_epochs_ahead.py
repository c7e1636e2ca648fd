"""One caller's epochs rule no other: far ones are refused, and a response that the window leaves out is answered so."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from histospec.client import DraftClient, Response
from histospec.server.history.namespaces import EPOCHS_AHEAD, FIRST_EPOCH
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

UNIX_TIME = 1_764_000_000
NUMBERS = itertools.count(1)
KEPT = 8
"""The default of --history-epochs."""


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A new namespace for each test."""
    return str(request.node.name)[:100]


@pytest.fixture
def wire(shared_server: Server, connect_shared: Connector) -> Wire:
    return connect_shared(shared_server.endpoint)


def epochs(wire: Wire, namespace: str, prompt: int = 9) -> list[int]:
    """The epochs of the stored responses of a prompt."""
    request = pb.HistoryRequest(namespace=namespace, prompt=wire.i32([prompt]))
    return [response.epoch for response in wire.stub.History(request).responses]


def commit(wire: Wire, namespace: str, **fields: Any) -> pb.DraftResponse:
    """The answer to the commit of a new session, on a stream of its own."""
    stream, session = wire.stream(), next(NUMBERS)
    stream.ask(opens=[wire.open(session, [9], namespace)], step=wire.step([session], [[1, 2]]))
    answer = stream.ask(closes=[wire.commit(session, 2, **fields)])
    stream.end()
    return answer


def imported(wire: Wire, namespace: str, *its_epochs: int) -> pb.ImportResponse:
    responses = [pb.Response(tokens=wire.i32([4, epoch % 1000]), epoch=epoch) for epoch in its_epochs]
    problem = pb.StoredProblem(prompt=wire.i32([9]), responses=responses)
    return wire.stub.Import(pb.ImportRequest(namespace=namespace, problems=[problem]))


def refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(grpc.RpcError, match=says) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_first_ingests_at_the_same_time_may_name_the_time_as_their_epoch(wire: Wire, namespace: str) -> None:
    """Until one of them is stored, none counts as too far ahead."""
    tokens = [pb.Response(tokens=wire.i32([1, 2]))]
    calls = [
        wire.stub.Ingest.future(
            pb.IngestRequest(namespace=namespace, prompt=wire.i32([number]), responses=tokens, epoch=UNIX_TIME)
        )
        for number in range(20)
    ]
    assert [call.exception() for call in calls] == [None] * len(calls)
    assert [epochs(wire, namespace, number) for number in range(20)] == [[UNIX_TIME]] * 20


@pytest.mark.parametrize("far", [5 + EPOCHS_AHEAD + 1, 2**31, 2**52])
def test_an_epoch_far_ahead_of_the_newest_is_refused_on_every_way_in(wire: Wire, namespace: str, far: int) -> None:
    """Honest responses that follow are kept, and drafted from."""
    wire.ingest([9], [[1, 2, 3]], namespace, epoch=5)
    limit = f"is more than the limit of {5 + EPOCHS_AHEAD}: too far ahead of 5, the newest epoch of namespace"
    refused(lambda: wire.ingest([9], [[7]] * KEPT, namespace, epoch=far), f"^(?s:.*)epoch: {far} {limit}")
    [refusal] = commit(wire, namespace, epoch=far).refusals
    assert f"closes.epoch: {far} {limit}" in refusal.reason
    assert not refusal.later
    first = max(FIRST_EPOCH + 1, far)
    refused(
        lambda: imported(wire, namespace, 4, first),
        rf"problems\[0\].responses\[1\].epoch: {first} is more than the limit of {FIRST_EPOCH}",
    )
    answer = wire.ingest([9], [[1, 2, 4]], namespace, epoch=6)
    assert (answer.responses, answer.too_old) == (1, 0)
    assert epochs(wire, namespace) == [5, 6]


def test_epochs_up_to_the_limit_are_taken(wire: Wire, namespace: str) -> None:
    wire.ingest([9], [[1]], namespace, epoch=5)
    wire.ingest([9], [[2]], namespace, epoch=5 + EPOCHS_AHEAD)
    assert not commit(wire, namespace, epoch=5 + 2 * EPOCHS_AHEAD).refusals
    assert epochs(wire, namespace) == [5, 5 + EPOCHS_AHEAD, 5 + 2 * EPOCHS_AHEAD]


def test_an_import_may_bring_problems_in_any_order_of_epochs(wire: Wire, namespace: str) -> None:
    imported(wire, namespace, 3)
    assert imported(wire, namespace, FIRST_EPOCH).responses == 1
    assert epochs(wire, namespace) == [3, FIRST_EPOCH]


def test_a_count_far_ahead_is_refused(wire: Wire, namespace: str) -> None:
    stream = wire.stream()
    for session, changes in ((1, 0), (2, 2**32 - 1), (3, 1)):
        stream.ask(opens=[wire.open(session, [9], namespace)], step=wire.step([session], [[1, session]]))
        refusals = stream.ask(closes=[wire.commit(session, 2, changes=changes)]).refusals
        assert [refusal.session for refusal in refusals] == ([2] if session == 2 else [])
        for refusal in refusals:
            assert refusal.reason.startswith(f"closes.changes: {2**32 - 1} is more than the limit of {EPOCHS_AHEAD}")
    assert epochs(wire, namespace) == [0, 1]


@pytest.mark.parametrize("changes", [0, 1, 3])
def test_a_trainer_may_name_unix_times_after_workers_have_counted(wire: Wire, namespace: str, changes: int) -> None:
    stream = wire.stream()
    for session in range(1, changes + 2):
        stream.ask(opens=[wire.open(session, [9], namespace)], step=wire.step([session], [[1, session]]))
        stream.ask(closes=[wire.commit(session, 2, changes=session - 1)])
    pause = 100 * 24 * 3600
    for when in (UNIX_TIME, UNIX_TIME + 600, UNIX_TIME + pause):
        wire.ingest([9], [[1, 2]], namespace, epoch=when)
    assert epochs(wire, namespace)[-3:] == [UNIX_TIME, UNIX_TIME + 600, UNIX_TIME + pause]


def test_a_trainer_may_count_in_thousands(wire: Wire, namespace: str) -> None:
    for step in (0, 1, 2, 500, 1500):
        wire.ingest([9], [[1, 2]], namespace, epoch=1000 * step)
    assert epochs(wire, namespace) == [0, 1000, 2000, 500_000, 1_500_000]


def test_a_first_epoch_of_milliseconds_is_refused(wire: Wire, namespace: str) -> None:
    refused(
        lambda: wire.ingest([9], [[1]], namespace, epoch=1000 * UNIX_TIME),
        f"epoch: {1000 * UNIX_TIME} is more than the limit of {FIRST_EPOCH}",
    )
    assert epochs(wire, namespace) == []


def test_the_limit_holds_after_a_restart(start_server: Starter, connect: Connector) -> None:
    server = start_server()
    connect(server.endpoint).ingest([9], [[1]], epoch=7)
    server.restart()
    wire = connect(server.endpoint)
    refused(lambda: wire.ingest([9], [[2]], epoch=UNIX_TIME), f"limit of {7 + EPOCHS_AHEAD}")
    wire.ingest([9], [[2]], epoch=8)
    assert epochs(wire, "run") == [7, 8]


def test_a_response_that_is_too_old_is_answered_so_and_a_rewind_helps(
    start_server: Starter, connect: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    """
    1. One writer names epochs within the limit, but eight too high; they fill the window of a problem.
    2. Honest responses are not kept, and their answers say so; metric, log and hint count them.
    3. After a rewind, they are kept.
    """
    server = start_server()
    wire = connect(server.endpoint)
    for ahead in range(KEPT):
        wire.ingest([9], [[7, ahead]], epoch=1000 + ahead)
    answer = wire.ingest([9], [[1, 2], [3, 4, 5]], epoch=3)
    assert (answer.responses, answer.tokens, answer.too_old) == (0, 0, 2)
    assert commit(wire, "run", epoch=3).too_old == 1
    assert commit(wire, "run", epoch=1007).too_old == 0
    assert imported(wire, "run", 2, 4).too_old == 2
    assert server.metrics()["histospec_too_old_responses_total"] == 5
    assert server.metrics()["histospec_ingested_responses_total"] == KEPT + 1

    with DraftClient(server.endpoint, namespace="run") as client:
        client.ingest([9], [Response([1, 2])], epoch=3)
        [session] = client.open([[9]])
        client.step([session], [[5, 6]])
        client.finish([session], epochs=[3])

        def acknowledged() -> bool:
            client.flush()
            return client.stats().commits == 1

        eventually(acknowledged)
        assert client.stats().too_old == 2
        lines = [record.message for record in caplog.records if "did not keep" in record.message]
        assert len(lines) == 1
        assert "rewind(epoch)" in lines[0]

        status = json.loads(server.get("/status")[1])
        [hint] = [hint for hint in status["hints"] if hint["title"] == "Responses are too old to keep"]
        assert "rewind" in hint["text"]
        assert "epoch 3 in namespace run, whose newest epoch is 1007" in hint["text"]
        assert client.rewind(3) == KEPT + 1
        client.ingest([9], [Response([1, 2])], epoch=3)
        assert client.stats().too_old == 2
    assert epochs(wire, "run") == [3]
    server.terminate()
    server.wait()
    assert len([line for line in server.log if "too old to keep" in json.dumps(line)]) == 1
