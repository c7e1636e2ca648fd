"""Import: adds what a shard lacks, each response with its epoch, and nothing twice."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from histospec.client import DraftClient, Response
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.records import to_message
from histospec.v1 import draft_pb2 as pb
from tests.support.clients import texts
from tests.support.contents import content, logprobs, on_disk, tokens
from tests.support.exports import export, problems
from tests.support.servers import Server, Starter, secret, with_tokens
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

RECORDS = [
    Record(tokens(5, 6), 0, 0.5, logprobs(2), b"\1\0", -(2**63)),
    Record(tokens(5, 6), 3),
    Record(tokens(5, 6), 3),  # the same response, sampled twice
    Record(tokens(*range(100)), 2**31, None, b"", b"", 0),
]


def request(records: list[Record], prompt: bytes = tokens(1, 2), name: str = "", **fields: bytes) -> pb.ImportRequest:
    responses = [to_message(record) for record in records]
    problem = pb.StoredProblem(prompt=prompt, problem=name, responses=responses)
    return pb.ImportRequest(namespace="run", problems=[problem], **fields)


def test_responses_keep_all_that_is_known_of_them(wire: Wire) -> None:
    both = request(RECORDS, name="a name ❤")
    both.problems.add(prompt=tokens(9), responses=[to_message(RECORDS[1])])
    answer = wire.stub.Import(both)
    assert (answer.responses, answer.tokens, answer.learned) == (5, 108, False)
    assert problems(export(wire.stub)) == {
        Problem("run", tokens(1, 2), "a name ❤"): RECORDS,
        Problem("run", tokens(9)): [RECORDS[1]],
    }
    assert [len(text) for text in wire.history([1, 2], problem="a name ❤")] == [2, 2, 2, 100]


def test_the_same_request_again_adds_nothing(wire: Wire) -> None:
    wire.stub.Import(request(RECORDS[:2]))
    answer = wire.stub.Import(request(RECORDS))
    assert (answer.responses, answer.tokens) == (2, 102)
    assert wire.stub.Import(request(RECORDS)).responses == 0
    assert problems(export(wire.stub)) == {Problem("run", tokens(1, 2)): RECORDS}


def test_a_reward_that_is_stored_with_more_digits_is_the_same(
    start_server: Starter, tmp_path: Path, connect: Connector
) -> None:
    """Responses restored from a file are there already; over the network, a reward is a float32."""
    store = on_disk(tmp_path, "exact")
    store.append(ResponseBatch(Problem("run", tokens(1, 2)), [Record(tokens(5), 0, 0.1)])).result()
    store.close()
    stub = connect(start_server(name="exact").endpoint).stub
    assert stub.Import(request([Record(tokens(5), 0, 0.1)])).responses == 0
    assert stub.Import(request([Record(tokens(5), 0, 0.2)])).responses == 1


def test_the_same_request_side_by_side_adds_nothing_twice(wire: Wire) -> None:
    """A client resends a request that it took for lost."""
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(wire.stub.Import, request(RECORDS)) for _ in range(8)]
    assert sum(answer.result().responses for answer in answers) == len(RECORDS)
    assert problems(export(wire.stub)) == {Problem("run", tokens(1, 2)): RECORDS}


def test_what_is_imported_is_drafted_from(wire: Wire) -> None:
    text = list(range(100, 140))
    wire.stub.Import(request([Record(tokens(*text), 7)], prompt=tokens(1, 2, 3)))
    stream = wire.stream()
    answer = stream.ask(opens=[wire.open(1)], step=wire.step([1], [text[:3]]))
    assert wire.drafts(answer)[0][:2] == text[3:5]


def test_counted_epochs_go_on_from_what_was_imported(wire: Wire) -> None:
    """An explicit epoch would end the counting: a restored run would stay at the epoch of its backup."""

    def committed(imported: bool, changes: int) -> int:
        namespace = "imported" if imported else "ingested"
        stream = wire.stream()
        step = wire.step([1], [[8, 9]])
        stream.ask(opens=[wire.open(1, namespace=namespace)], step=step, closes=[wire.commit(1, 2, changes=0)])
        stream.ask(
            opens=[wire.open(2, namespace=namespace)], step=wire.step([2], [[8, 9]]),
            closes=[wire.commit(2, 2, changes=changes)],
        )  # fmt: skip
        found = problems(export(wire.stub, namespace))
        return max(record.epoch for records in found.values() for record in records)

    again = request([Record(tokens(1), 7)])
    again.namespace = "imported"
    wire.stub.Import(again)
    wire.ingest([1], [[1]], namespace="ingested", epoch=7)
    assert committed(imported=True, changes=2) == 9
    assert committed(imported=False, changes=2) == 7


def test_an_estimator_is_taken_where_nothing_was_learned(
    server: Server, wire: Wire, start_server: Starter, connect: Connector
) -> None:
    text = list(range(100, 140))
    wire.ingest([1, 2, 3], [text])
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[]]))
    for at in range(0, 36, 4):
        stream.ask(step=wire.step([1], [text[at : at + 4]], [at]))
    server.terminate()  # saves the estimators
    stream.end()
    assert server.wait() == 0
    server.start()
    (state,) = {m.estimator for m in export(wire.stub) if m.estimator}
    second = start_server(name="second")
    there = connect(second.endpoint)
    assert there.stub.Import(pb.ImportRequest(namespace="run", estimator=state)).learned
    assert [m.estimator for m in export(there.stub) if m.namespace == "run"] == [state]
    assert not there.stub.Import(pb.ImportRequest(namespace="run", estimator=state)).learned
    assert not there.stub.Import(pb.ImportRequest(namespace="other", estimator=b"of another version")).learned
    eventually(lambda: any("estimator cannot be used" in str(entry["event"]) for entry in second.log))


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"namespace": ""}, "INVALID_ARGUMENT", "namespace: must not be empty"),
        ({"namespace": " run"}, "INVALID_ARGUMENT", "namespace: ' run' begins or ends with white space; give 'run'"),
        ({"prompt": b""}, "INVALID_ARGUMENT", "problems[0].prompt: must not be empty"),
        ({"prompt": b"abc"}, "INVALID_ARGUMENT", "problems[0].prompt: 3 bytes are not a whole number of int32 values"),
        (
            {"problem": "x" * 1025},
            "INVALID_ARGUMENT",
            "problems[0].problem: 1025 characters are over the limit of 1024",
        ),
        ({"epoch": -1}, "INVALID_ARGUMENT", "problems[0].responses[1].epoch: -1 is negative"),
        ({"tokens": b""}, "INVALID_ARGUMENT", "problems[0].responses[1].tokens: must not be empty"),
        ({"logprobs": b"abcd"}, "INVALID_ARGUMENT", "problems[0].responses[1].logprobs: 1 values for 2 tokens"),
        ({"prompt": tokens(*range(65))}, "RESOURCE_EXHAUSTED",
         "problems[0].prompt: 65 tokens are more than the limit of 64"),
        ({"tokens": tokens(*range(65))}, "RESOURCE_EXHAUSTED",
         "problems[0].responses[1].tokens: 65 are more than the limit of 64"),
        ({"problems": 17}, "RESOURCE_EXHAUSTED", "problems: 17 are more than the limit of 16"),
        ({"responses": 17}, "RESOURCE_EXHAUSTED", "problems[0].responses: 17 are more than the limit of 16"),
    ],
)  # fmt: skip
def test_what_is_malformed_or_too_large_changes_nothing(
    shared_small: Server, connect_shared: Connector, change: dict[str, object], code: str, said: str
) -> None:
    stub = connect_shared(shared_small.endpoint).stub
    asked = request([RECORDS[0], Record(tokens(1, 2), 1)])
    ((field, value),) = change.items()
    if field == "problems":
        asked.problems.extend([asked.problems[0]] * (int(str(value)) - 1))
    elif field == "responses":
        asked.problems[0].responses.extend([asked.problems[0].responses[0]] * (int(str(value)) - 2))
    elif field == "namespace":
        asked.namespace = str(value)
    else:
        setattr(asked.problems[0] if field in ("prompt", "problem") else asked.problems[0].responses[1], field, value)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Import(asked)
    assert (caught.value.code().name, caught.value.details()) == (code, said)
    assert problems(export(stub)) == {}


@pytest.fixture(scope="module")
def shared_small(start_shared: Starter) -> Server:
    """Returns a server with small limits."""
    limits = ("--max-prompt-tokens", "64", "--max-session-tokens", "64", "--max-batch", "16")
    return start_shared(*limits, name="small")


def test_an_import_needs_the_right_to_admin(start_server: Starter, connect: Connector, tmp_path: Path) -> None:
    server = start_server(*with_tokens(tmp_path, worker={"rights": ["read", "write"]}))
    metadata = (("authorization", f"Bearer {secret('worker')}"),)
    with pytest.raises(grpc.RpcError) as caught:
        connect(server.endpoint).stub.Import(request(RECORDS), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_what_was_acknowledged_survives_a_kill(server: Server, wire: Wire, tmp_path: Path) -> None:
    wire.stub.Import(request(RECORDS))
    server.kill()
    store = on_disk(tmp_path, server.data_dir.name)
    assert content(store)[0] == {Problem("run", tokens(1, 2)): RECORDS}
    store.close()


def test_responses_that_workers_added_meanwhile_stay(server: Server, wire: Wire) -> None:
    with DraftClient(server.endpoint, "run", deadline=60.0) as client:
        client.ingest([1, 2], [Response([7, 7])], epoch=3)
        wire.stub.Import(request(RECORDS))
        assert texts(client.history([1, 2])) == [[5, 6], [7, 7], [5, 6], [5, 6], list(range(100))]
