"""Servers with low limits: the client splits batches, and one message that is too large affects no other."""

import logging

import grpc
import numpy as np
import pytest

from histospec.client import AsyncDraftClient, Breaker, DraftClient, LimitExceeded, Limits, Response
from histospec.client.core.message_limits import ServerLimits
from histospec.v1 import draft_pb2 as pb
from tests.support.clients import flushed, texts
from tests.support.odd_server import OddServer
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

PATIENT = 60.0
QUICK = Breaker(cooldown=0.05, cooldown_max=0.2)
SMALL = ("--max-batch", "64", "--max-message", "64KiB")
TINY = ("--max-batch", "7", "--max-message", "1KiB", "--max-draft-tokens", "3")


def stored(server: Server, count: int) -> list[list[list[int]]]:
    with DraftClient(server.endpoint, "run") as client:
        answers = client.histories([[7, n] for n in range(count)])
    return [texts(answer) for answer in answers]


@pytest.mark.parametrize(("flags", "count"), [((), 10_000), (SMALL, 3000), (TINY, 300)])
def test_any_number_of_sessions_opens_steps_and_closes_in_one_go(
    start_server: Starter,
    flags: tuple[()] | tuple[str, str, str, str] | tuple[str, str, str, str, str, str],
    count: int,
) -> None:
    """Half of the sessions are committed, no stream ends, and all responses arrive."""
    server = start_server(*flags)
    with DraftClient(server.endpoint, "run", deadline=PATIENT) as client:
        client.ingest([7, 0], [Response(range(50))])
        sessions = client.open([[7, n] for n in range(count)])
        client.flush(PATIENT)
        for token in range(2):
            drafts = client.step(sessions, [[token]] * count, max_tokens=16)
        assert 0 < len(drafts[0]) <= 16
        assert server.metrics()["histospec_sessions"] == count
        client.close(sessions[: count // 2])
        client.close(sessions[count // 2 :], commit=False)
        client.flush(PATIENT)
        stats = client.stats()
        assert (stats.steps, stats.late, stats.failed, stats.reopened, stats.refused) == (2, 0, 0, 0, 0)
        assert (stats.commits, stats.pending_commits, stats.dropped_commits) == (count // 2, 0, 0)
        assert set(stats.breakers.values()) == {"closed"}
        assert len(client.predict_length([7, 0]).lengths)  # after all messages
        lengths = client.predict_lengths([[7, n] for n in range(count)], quantiles=[0])
        assert [int(p.lengths[0]) for p in lengths[:3] if p] == [2, 2, 2]
        assert [p.observations for p in lengths[: count // 2] if p] == [2] + [1] * (count // 2 - 1)
    eventually(lambda: server.metrics()["histospec_sessions"] == 0, "sessions are left")
    assert stored(server, 200)[1:] == [[[0, 1]] if n < count // 2 else [] for n in range(1, 200)]


def test_responses_of_sessions_that_the_server_has_never_seen(start_server: Starter) -> None:
    """They were finished while it was away: the client opens and closes them in messages that the server takes."""
    server = start_server(*SMALL)
    with DraftClient(server.endpoint, "run", deadline=0.05, breaker=QUICK) as client:
        server.kill()
        sessions = client.open([[7, n] for n in range(1000)])
        client.step(sessions, [[1, 2, 3]] * 1000)
        client.close(sessions)
        server.restart()
        eventually(lambda: flushed(client, PATIENT).pending_commits == 0)
        assert (client.stats().commits, client.stats().dropped_commits) == (1000, 0)
    assert stored(server, 200) == [[[1, 2, 3]]] * 200


@pytest.mark.parametrize("most", ["2", "50"])
def test_more_sessions_than_a_stream_may_have(start_server: Starter, most: str) -> None:
    """The other sessions get no drafts, but their responses arrive."""
    server = start_server("--max-sessions-per-stream", most)
    with DraftClient(server.endpoint, "run", deadline=PATIENT) as client:
        sessions = client.open([[7, n] for n in range(500)])
        client.flush(PATIENT)
        for token in range(3):
            client.step(sessions, [[token]] * 500)
        client.close(sessions[1:])
        client.flush(PATIENT)
        stats = client.stats()
        assert (stats.failed, stats.refused, stats.reopened, stats.dropped_commits) == (0, 0, 0, 0)
        assert (stats.commits, stats.pending_commits) == (499, 0)
        client.step(sessions[:1], [[3]])
        client.close(sessions[:1])
    assert stored(server, 500) == [[[0, 1, 2, 3]], *[[[0, 1, 2]]] * 499]


def test_what_fits_into_no_message_is_refused_alone(start_server: Starter, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt, new tokens and logprobs that are each larger than a message may be."""
    server = start_server("--max-message", "16KiB")
    long = list(range(5000))
    with DraftClient(server.endpoint, "run", deadline=PATIENT) as client:
        client.ingest([7, 0], [Response(range(50))])
        good, prompt, tokens, scores = client.open([[7, 0], long, [7, 2], [7, 3]])
        with caplog.at_level(logging.WARNING, "histospec.client"):
            drafts = client.step([prompt, good, scores], [[1], [0], [5] * 2000])
            assert [len(d) > 0 for d in drafts][:2] == [False, True]
            client.step([tokens, good], [long, [1]])
            client.step([scores], [[5] * 2500])
            client.close([good, scores], logprobs=[None, [0.5] * 4500])
            client.close([prompt, tokens], commit=False)
            client.flush(PATIENT)
        assert client.step(client.open([[7, 0]]), [[0, 1]])[0].tokens[0] == 2
        stats = client.stats()
        assert (stats.failed, stats.late, stats.refused, stats.reopened) == (0, 0, 3, 0)
        assert (stats.commits, stats.dropped_commits, stats.pending_commits) == (1, 1, 0)
    eventually(lambda: server.metrics()["histospec_sessions"] == 0, "sessions are left")
    assert stored(server, 4) == [[list(range(50)), [0, 1]], [], [], []]
    for part in ("open", "close"):  # the refusal of the step comes within the same minute
        assert any(f"its {part} takes" in r.getMessage() and "--max-message" in r.getMessage() for r in caplog.records)


def test_ingest_of_any_size(start_server: Starter) -> None:
    """The client splits by the limit in the first refusal, and reports a response that is too large."""
    server = start_server(*TINY)
    with DraftClient(server.endpoint, "run") as client:
        client.ingest([7, 0], [Response([n, n + 1]) for n in range(300)], epoch=1)
        assert [r.tokens[0] for r in client.history([7, 0], limit=100)] == list(range(200, 300))
        assert server.metrics()["histospec_ingested_responses_total"] == 300
        groups = [[Response([n, m]) for m in range(20)] for n in range(5)]
        assert client.ingest_many([[8, n] for n in range(5)], groups, epoch=1) == [True] * 5
        assert [len(texts(h)) for h in client.histories([[8, n] for n in range(5)])] == [20] * 5
        with pytest.raises(LimitExceeded, match="larger than max"):
            client.ingest([7, 1], [Response(range(1000))])


@pytest.mark.asyncio
async def test_async_face_with_a_server_that_takes_little(start_server: Starter) -> None:
    server = start_server(*TINY)
    async with AsyncDraftClient(server.endpoint, "run", deadline=PATIENT) as client:
        sessions = await client.open([[7, n] for n in range(200)])
        await client.step(sessions, [[1, 2]] * 200)
        await client.close(sessions)
        await client.flush(PATIENT)
        await client.ingest([8], [Response([n]) for n in range(50)])
        assert len(await client.history([8])) == 50
        assert (client.stats().commits, client.stats().failed) == (200, 0)
    assert stored(server, 200) == [[[1, 2]]] * 200


def test_limits_of_a_server_that_tells_none_are_learned_from_its_refusal(odd_server: OddServer) -> None:
    """Its first refusal ends a stream, counts as no attempt of a response, and opens no breaker."""
    batches = []

    def refuse(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        sizes = (len(request.opens), len(request.closes), len(request.step.sessions) // 8)
        if max(sizes) > 3:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"step.sessions: {max(sizes)} are more than the limit of 3"
            )
        batches.append(sizes)
        return odd_server.draft(request)

    odd_server.answer = refuse
    with DraftClient(odd_server.endpoint, "run", deadline=2.0, breaker=Breaker(failures=1)) as client:
        sessions = client.open([[7, n] for n in range(10)])
        client.step(sessions, [[1]] * 10)
        eventually(lambda: all(len(d) for d in client.step(sessions, [[1]] * 10)))
        client.close(sessions)
        client.flush(2.0)
        stats = client.stats()
        assert (stats.failed, stats.skipped, stats.commits, stats.dropped_commits) == (1, 0, 10, 0)
        assert max(map(max, batches)) == 3


@pytest.mark.parametrize(
    ("details", "limits"),
    [
        ("closes: 9000 are more than the limit of 4096", ServerLimits(batch=4096)),
        ("opens: 65 are more than the limit of 64; counting stopped there", ServerLimits(batch=64)),
        ("SERVER: Received message larger than max (100016 vs. 65536)", ServerLimits(message=65536)),
        ("step.max_tokens: 200 is over the limit of 64", ServerLimits(draft=64)),
        ("step.max_tokens: 200 is over the limit of 0", ServerLimits()),
        ("full", ServerLimits()),
    ],
)
def test_refusals_name_their_limit(details: str, limits: ServerLimits) -> None:
    assert ServerLimits().refused(details) == limits
    assert limits.refused(details) == limits  # known


def test_limits_that_are_no_numbers_are_ignored() -> None:
    told = [("histospec-max-batch", "64"), ("histospec-max-message", "lots"), ("histospec-max-draft-tokens", "0")]
    assert ServerLimits.from_metadata(told) == ServerLimits(batch=64)
    assert ServerLimits.from_metadata(None) == ServerLimits()


def test_a_client_with_smaller_limits_of_its_own(odd_server: OddServer) -> None:
    limits = Limits(batch=2)
    with DraftClient(odd_server.endpoint, "run", deadline=2.0, limits=limits) as client:
        drafts = client.step(client.open([[7]] * 5), [[1]] * 5)
        assert [d.tokens.tolist() for d in drafts] == [[1], [2], [3], [4], [5]]
        assert client.stats().steps == 1
    assert [len(r.step.sessions) // 8 for r in odd_server.requests if isinstance(r, pb.DraftRequest)] == [2, 2, 1]
    assert np.frombuffer(odd_server.requests[0].step.sessions, "<u8").tolist() == [1, 2]
