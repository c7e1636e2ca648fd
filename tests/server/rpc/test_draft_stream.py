"""The Draft stream over raw gRPC: the promises of draft.proto, message by message."""

import asyncio
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest

from histospec.server.rpc import slices
from histospec.server.rpc import wire as messages
from histospec.server.rpc.answers import Commit
from histospec.server.rpc.draft_stream import DraftStream
from histospec.v1 import draft_pb2 as pb
from tests.support.batches import batch
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

RESPONSE = list(range(10, 40))


@pytest.fixture
def known(wire: Wire) -> Wire:
    """Returns a server with RESPONSE in the history of the prompt (1, 2, 3)."""
    wire.ingest([1, 2, 3], [RESPONSE])
    return wire


def test_a_step_drafts_what_the_history_says(known: Wire) -> None:
    stream = known.stream()
    answer = stream.ask(opens=[known.open(5)], step=known.step([5], [RESPONSE[:4]]))
    [draft] = known.drafts(answer)
    assert draft
    assert draft == RESPONSE[4 : 4 + len(draft)]
    probs = np.frombuffer(answer.probs, "<f4")
    assert ((probs > 0) & (probs <= 1)).all()
    assert stream.end() == []


def test_other_problems_draft_where_there_is_no_history(start_server: Starter, connect: Connector) -> None:
    def drafts(*flags: str) -> tuple[list[int], bytes, float]:
        server = start_server(*flags)
        wire = connect(server.endpoint)
        for i in range(200):
            wire.ingest([i], [range(1000, 1100)])
        answer = wire.stream().ask(opens=[wire.open(1, [7000])], step=wire.step([1], [range(1000, 1020)]))
        drafted = server.metrics().get('histospec_source_draft_tokens_total{namespace="run",source="namespace"}', 0)
        return wire.drafts(answer)[0], answer.probs, drafted

    draft, probs, drafted = drafts()
    assert draft
    assert draft == list(range(1020, 1020 + len(draft)))
    assert drafted == len(draft)
    assert drafts("--threads", "3") == (draft, probs, drafted)
    assert drafts("--namespace-tokens", "0") == ([], b"", 0)


def test_a_step_answers_every_session_in_its_order(known: Wire) -> None:
    stream = known.stream()
    opens = [known.open(2), known.open(1, prompt=[9, 9]), known.open(3)]
    answer = stream.ask(opens=opens, step=known.step([3, 1, 2], [RESPONSE[:4], [77], RESPONSE[:8]]))
    assert len(np.frombuffer(answer.lengths, "<i4")) == 3
    first, unseen, last = known.drafts(answer)
    assert first[:1] == [RESPONSE[4]]
    assert unseen == []
    assert last[:1] == [RESPONSE[8]]


def test_max_tokens_0_only_appends(known: Wire) -> None:
    stream = known.stream()
    assert known.drafts(stream.ask(opens=[known.open(1)], step=known.step([1], [RESPONSE[:4]], max_tokens=0))) == [[]]
    [draft] = known.drafts(stream.ask(step=known.step([1], [[RESPONSE[4]]], [4], max_tokens=1)))
    assert draft == [RESPONSE[5]]


def test_a_step_for_no_session_is_answered(known: Wire) -> None:
    assert known.drafts(known.stream().ask(step=known.step([], []))) == []


def test_repeated_tokens_are_applied_once(known: Wire) -> None:
    stream = known.stream()
    stream.ask(opens=[known.open(1)], step=known.step([1], [RESPONSE[:6]]))
    stream.ask(step=known.step([1], [RESPONSE[:6]], [0]))  # repeats the whole step
    stream.ask(step=known.step([1], [RESPONSE[4:9]], [4]))  # overlaps by two
    stream.ask(closes=[known.commit(1, 9)])
    assert known.history([1, 2, 3])[1] == RESPONSE[:9]


def test_a_gap_makes_the_session_unknown_and_leaves_the_others(known: Wire) -> None:
    stream = known.stream()
    stream.ask(opens=[known.open(1), known.open(2)], step=known.step([1, 2], [RESPONSE[:4]] * 2))
    answer = stream.ask(step=known.step([1, 2], [[RESPONSE[5]], [RESPONSE[4]]], [5, 4]))
    assert known.unknown(answer) == [1]
    gap, other = known.drafts(answer)
    assert gap == []
    assert other[:1] == [RESPONSE[5]]
    # Reopened with the worker's own context, it continues under the same id.
    reopened = known.open(1, generated=known.i32(RESPONSE[:6]))
    answer = stream.ask(opens=[reopened], step=known.step([1], [[RESPONSE[6]]], [6]))
    assert known.unknown(answer) == []
    assert known.drafts(answer)[0][:1] == [RESPONSE[7]]


def test_sessions_never_opened_are_unknown(known: Wire) -> None:
    stream = known.stream()
    answer = stream.ask(step=known.step([4, 9], [[1], [1]]), closes=[known.commit(6, 1)])
    assert known.unknown(answer) == [4, 9, 6]
    assert known.drafts(answer) == [[], []]


def test_a_commit_joins_the_history_and_drafts_for_others_at_once(wire: Wire) -> None:
    stream, other = wire.stream(), wire.stream()
    stream.ask(opens=[wire.open(1, problem="p")], step=wire.step([1], [RESPONSE]))
    stream.ask(closes=[wire.commit(1, len(RESPONSE), epoch=7, reward=0.5, logprobs=b"\0" * 4 * len(RESPONSE))])
    [draft] = wire.drafts(other.ask(opens=[wire.open(1, problem="p")], step=wire.step([1], [RESPONSE[:4]])))
    assert draft[:1] == [RESPONSE[4]]
    request = pb.HistoryRequest(namespace="run", prompt=wire.i32([1, 2, 3]), problem="p")
    [stored] = wire.stub.History(request).responses
    assert stored.tokens == wire.i32(RESPONSE)
    assert (stored.epoch, stored.reward, stored.logprobs) == (7, 0.5, b"\0" * 4 * len(RESPONSE))
    assert wire.history([1, 2, 3]) == []  # the same prompt without the name is another problem


def test_a_commit_of_another_length_is_refused_as_unknown(wire: Wire) -> None:
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [RESPONSE]))
    answer = stream.ask(closes=[wire.commit(1, len(RESPONSE) + 1)])
    assert wire.unknown(answer) == [1]
    assert wire.history([1, 2, 3]) == []


def test_a_commit_of_nothing_is_answered_and_stores_nothing(wire: Wire) -> None:
    stream = wire.stream()
    stream.send(opens=[wire.open(1)])
    answer = stream.ask(closes=[wire.commit(1, 0)])
    assert wire.unknown(answer) == []
    assert wire.history([1, 2, 3]) == []


def test_opens_and_plain_closes_are_not_answered(wire: Wire) -> None:
    stream = wire.stream()
    stream.send(opens=[wire.open(1), wire.open(2)])
    stream.send(closes=[pb.CloseSession(session=1), pb.CloseSession(session=77)])
    sequence = stream.send(step=wire.step([2], [[1]]))
    assert stream.receive().sequence == sequence
    assert stream.end() == []


def test_a_commit_without_an_epoch_takes_the_newest(wire: Wire) -> None:
    wire.ingest([8], [[1, 2]], epoch=41)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5, 6]]))
    stream.ask(closes=[wire.commit(1, 2)])
    request = pb.HistoryRequest(namespace="run", prompt=wire.i32([1, 2, 3]))
    assert wire.stub.History(request).responses[0].epoch == 41


def test_commits_sent_before_the_end_of_a_stream_are_stored_and_answered(wire: Wire) -> None:
    stream = wire.stream()
    stream.send(opens=[wire.open(i) for i in range(50)], step=wire.step(range(50), [[i, i + 1] for i in range(50)]))
    sent = [stream.send(closes=[wire.commit(i, 2)]) for i in range(50)]
    answered = [response.sequence for response in stream.end()]
    assert sorted(answered[1:]) == sent
    assert sorted(wire.history([1, 2, 3])) == [[i, i + 1] for i in range(50)]


def test_two_streams_do_not_share_session_ids(wire: Wire, server: Server) -> None:
    one, two = wire.stream(), wire.stream()
    one.ask(opens=[wire.open(1, prompt=[1])], step=wire.step([1], [[11]]))
    two.ask(opens=[wire.open(1, prompt=[2])], step=wire.step([1], [[22]]))
    assert server.metrics()["histospec_sessions"] == 2
    one.ask(closes=[wire.commit(1, 1)])
    two.ask(closes=[wire.commit(1, 1)])
    assert wire.history([1]) == [[11]]
    assert wire.history([2]) == [[22]]


def test_sessions_end_with_their_stream_uncommitted(wire: Wire, server: Server) -> None:
    stream, other = wire.stream(), wire.stream()
    stream.ask(opens=[wire.open(1), wire.open(2)], step=wire.step([1, 2], [[5], [6]]))
    other.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    stream.cancel()
    with pytest.raises(grpc.RpcError):
        stream.receive()
    eventually(lambda: server.metrics()["histospec_streams"] <= 1, "the stream stays")
    assert server.metrics()["histospec_sessions"] == 1
    assert wire.history([1, 2, 3]) == []
    assert wire.unknown(other.ask(step=wire.step([1], [[6]], [1]))) == []


def test_clients_that_leave_in_the_middle_hurt_nobody(server: Server, connect: Connector) -> None:
    """
    1. Clients send steps and commits, and leave without waiting for all answers.
    2. The server continues for others; its log only says that they left.
    """
    sessions = range(20)
    for wait in range(40):
        wire = connect(server.endpoint)
        stream = wire.stream()
        stream.ask(opens=[wire.open(i) for i in sessions], step=wire.step(sessions, [[5]] * 20))
        for i in sessions:
            stream.send(closes=[wire.commit(i, 1)])
        for _ in range(wait % 4):
            stream.receive()
        if wait % 2:
            stream.cancel()
        else:
            wire.channel.close()
    eventually(lambda: not server.metrics()["histospec_streams"], "streams stay")
    ended = [line["outcome"] for line in server.logged("draft stream ended", 40)]
    assert len(ended) == 40
    assert set(ended) - {"ok"} == {"left"}  # "ok" if the server read the end of the stream before it noticed
    assert {entry["level"] for entry in server.log} == {"info"}
    wire = connect(server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1, [9])], step=wire.step([1], [[5, 6]]))
    stream.ask(closes=[wire.commit(1, 2)])
    assert wire.history([9]) == [[5, 6]]


def test_ingests_that_nobody_waits_for_hurt_nobody(server: Server, wire: Wire) -> None:
    """
    1. Clients start many ingests at once, wait for the first, and abandon the others.
    2. The server continues for others, and the index has what it stored of the abandoned ones.
    """
    responses = [pb.Response(tokens=wire.i32(range(2000)))] * 4
    for i in range(20):
        requests = [pb.IngestRequest(namespace="run", prompt=wire.i32([i, k]), responses=responses) for k in range(16)]
        first, *others = [wire.stub.Ingest.future(request, timeout=60) for request in requests]
        assert first.result().responses == 4
        for other in others:
            other.cancel()  # type: ignore[no-untyped-call]
    wire.ingest([5000], [[1, 2]])
    assert wire.history([5000]) == [[1, 2]]

    def all_indexed() -> bool:
        samples = server.metrics()
        return samples["histospec_history_tokens"] == samples["histospec_ingested_tokens_total"]

    eventually(all_indexed, "the index lacks some of what was stored")
    assert server.metrics()["histospec_ingested_responses_total"] >= 81
    assert {entry["level"] for entry in server.log} == {"info"}


def test_a_session_over_its_limits_is_refused_and_the_others_go_on(start_server: Starter, connect: Connector) -> None:
    server = start_server("--max-prompt-tokens", "5", "--max-session-tokens", "10", "--max-sessions-per-stream", "3")
    wire = connect(server.endpoint)
    stream = wire.stream()
    answer = stream.ask(
        opens=[wire.open(1, prompt=range(6)), wire.open(2, generated=wire.i32(range(11))), wire.open(3)],
        step=wire.step([3], [[1] * 6]),
    )
    assert [(r.session, r.reason.split(":")[0]) for r in answer.refusals] == [
        (1, "opens[0].prompt"),
        (2, "opens[1].generated"),
    ]
    assert "limit of 5" in answer.refusals[0].reason
    answer = stream.ask(opens=[wire.open(4), wire.open(5), wire.open(6)], step=wire.step([3], [[1] * 5], [6]))
    assert [r.session for r in answer.refusals] == [6, 3]
    assert wire.unknown(answer) == []
    assert wire.unknown(stream.ask(step=wire.step([4, 5], [[1], [1]]))) == []


def test_drop_namespace_forgets_in_index_and_store_and_nothing_else(known: Wire, server: Server) -> None:
    known.ingest([1, 2, 3], [RESPONSE], namespace="other")
    stream = known.stream()
    stream.ask(opens=[known.open(1)], step=known.step([1], [RESPONSE[:4]]))
    assert known.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run")).responses == 1
    assert known.history([1, 2, 3]) == []
    assert known.history([1, 2, 3], namespace="other") == [RESPONSE]
    assert server.metrics()["histospec_history_tokens"] == len(RESPONSE)
    assert known.drafts(stream.ask(step=known.step([1], [[900]], [4]))) == [[]]
    assert known.stub.DropNamespace(pb.DropNamespaceRequest(namespace="never seen")).responses == 0


def test_predict_length(wire: Wire) -> None:
    wire.ingest([1, 2, 3], [range(n) for n in (10, 20, 30)])
    request = pb.PredictLengthRequest(namespace="run", prompt=wire.i32([1, 2, 3]), quantiles=[0.0, 0.5, 1.0])
    answer = wire.stub.PredictLength(request)
    assert (list(answer.quantiles), list(answer.lengths), answer.observations) == ([0, 0.5, 1], [10, 20, 30], 3)
    request.generated = 10
    assert list(wire.stub.PredictLength(request).lengths) == [20, 25, 30]
    assert not wire.stub.PredictLength(pb.PredictLengthRequest(namespace="none", prompt=wire.i32([1]))).lengths


def test_predict_lengths_of_many_problems_and_a_stranger(wire: Wire) -> None:
    wire.ingest([1], [range(10), range(30)])
    wire.ingest([2], [range(100)])
    who = [pb.ExpectedResponse(prompt=wire.i32([1])), pb.ExpectedResponse(prompt=wire.i32([2])),
           pb.ExpectedResponse(prompt=wire.i32([1]), generated=10)]  # fmt: skip
    answer = wire.stub.PredictLengths(pb.PredictLengthsRequest(namespace="run", problems=who, quantiles=[0.5]))
    assert list(answer.quantiles) == [0.5]
    assert [(list(p.quantiles), list(p.lengths), p.observations) for p in answer.predictions] == [
        ([], [20], 2), ([], [100], 1), ([], [30], 1),
    ]  # fmt: skip
    none = wire.stub.PredictLengths(pb.PredictLengthsRequest(namespace="none", problems=who))
    assert [list(p.lengths) for p in none.predictions] == [[], [], []]
    assert len(none.quantiles) == 4


def test_history_limit_takes_the_newest(wire: Wire) -> None:
    for epoch in range(3):
        wire.ingest([1], [[epoch, 1], [epoch, 2]], epoch=epoch)
    assert wire.history([1], limit=3) == [[1, 2], [2, 1], [2, 2]]
    assert len(wire.history([1])) == 6


def test_namespaces_are_bounded(start_server: Starter, connect: Connector) -> None:
    """Callers that invent namespaces cannot fill the memory with them; existing ones continue."""
    server = start_server("--max-namespaces", "2")
    wire = connect(server.endpoint)
    wire.ingest([1], [[2, 3]], epoch=0, namespace="one")
    stream = wire.stream()
    answer = stream.ask(opens=[wire.open(1, [1], namespace="two")], step=wire.step([1], [[5]]))
    assert not answer.refusals
    answer = stream.ask(opens=[wire.open(2, [1], namespace="three")], step=wire.step([1], [[6]], [1]))
    assert "the server is at its limit of 2 namespaces" in answer.refusals[0].reason
    with pytest.raises(grpc.RpcError, match="--max-namespaces"):
        wire.ingest([1], [[2, 3]], epoch=0, namespace="three")
    wire.ingest([1], [[2, 4]], epoch=0, namespace="one")
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="one"))
    wire.ingest([1], [[2, 3]], epoch=0, namespace="three")


def test_idle_streams_take_nothing_from_the_part_of_others(start_server: Starter, connect: Connector) -> None:
    """
    1. One stream fills the half of --memory that running sessions may hold, and is refused more.
    2. Forty streams without a session do not keep a stream with one session from opening another.
    """
    wire = connect(start_server("--memory", "1MiB").endpoint)
    greedy, small = wire.stream(), wire.stream()
    small.ask(opens=[wire.open(1, [7])], step=wire.step([1], [[1]]))
    for _ in range(40):
        wire.stream().ask(step=wire.step([], []))
    refused, session = "", 0
    while not refused:
        session += 1
        prompt = range(session * 1_000, (session + 1) * 1_000)
        answer = greedy.ask(opens=[wire.open(session, prompt)], step=wire.step([session], [[1]]))
        refused = "".join(refusal.reason for refusal in answer.refusals)
    assert "half of --memory, and this stream more than its share" in refused
    assert not small.ask(opens=[wire.open(2, [8])], step=wire.step([1], [[2]])).refusals


@pytest.mark.asyncio
async def test_what_the_index_has_is_stored_though_the_stream_ends_amid_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = Mock(refuses_commits=AsyncMock(return_value=""), commit=AsyncMock(return_value=batch(b"aaaa")))
    context = Mock(write=AsyncMock(), peer=lambda: "ipv4:127.0.0.1:5000")
    stream = DraftStream(Mock(), history, Mock(), Mock(), Mock(), context, Mock(), Mock())
    closes = [messages.Close(session, True, 0, None, b"", 1, 0, b"") for session in (1, 2)]
    message = Mock(opens=[], step=None, closes=closes, sequence=1)
    monkeypatch.setattr(messages, "message", lambda *_: message)
    monkeypatch.setattr(slices.Pacer, "after", AsyncMock(side_effect=asyncio.CancelledError))
    monkeypatch.setattr(
        stream, "_close_session", lambda close, answer, _: answer.commits.append(Commit(1, batch(b"aaaa"), 0, Mock()))
    )
    with pytest.raises(asyncio.CancelledError):
        await stream._apply(pb.DraftRequest())
    await stream._answers.stored()
    assert history.commit.await_count == 1
