"""The client's contract with a real server, blocking and asyncio."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import histospec.client
from histospec.client import AsyncDraftClient, DraftClient, Response, Shard
from histospec.client.core.step import Drafts, Part, Pending
from tests.support.clients import texts
from tests.support.odd_server import OddServer
from tests.support.servers import Server
from tests.support.waiting import eventually, until

PROMPT = [11, 12, 13, 14]
TEXT = list(range(100, 160))
PATIENT = 5.0
"""A deadline that a busy test machine does not miss; that the deadline holds is tested in test_faults.py."""


@pytest.fixture
def client(shared_server: Server, request: pytest.FixtureRequest) -> Iterator[DraftClient]:
    with DraftClient(shared_server.endpoint, namespace=request.node.name, deadline=PATIENT) as client:
        yield client


def roll_out(client: DraftClient, prompt: list[int], text: list[int], **close: Any) -> tuple[int, int]:
    """Generates `text` as a deterministic policy would, taking what is drafted. -> tokens, steps."""
    (session,) = client.open([prompt])
    done, steps, new = 0, 0, list[int]()
    while done < len(text):
        (draft,) = client.step([session], [new], max_tokens=8)
        accepted = 0
        while accepted < len(draft) and done + accepted < len(text) and draft.tokens[accepted] == text[done + accepted]:
            accepted += 1
        new = text[done : done + accepted + 1]
        done += len(new)
        steps += 1
    client.step([session], [new], max_tokens=0)
    client.close([session], **close)
    return done, steps


def test_second_visit_drafts_what_the_first_wrote(client: DraftClient) -> None:
    tokens, steps = roll_out(client, PROMPT, TEXT)
    assert steps == tokens
    assert texts(client.history(PROMPT)) == [TEXT]
    tokens, steps = roll_out(client, PROMPT, TEXT)
    assert tokens / steps > 1.5
    stats = client.stats()
    assert stats.drafts > 0
    assert stats.late == stats.failed == stats.reopened == stats.dropped_commits == 0


def test_runners_up_where_the_history_forks(client: DraftClient) -> None:
    """The other tokens have no runner-up, nor has an empty draft. A step that does not ask gets none."""
    fork = 20
    client.ingest(PROMPT, [Response(TEXT)] * 2 + [Response([*TEXT[:fork], 7, *TEXT[fork + 1 :]])], epoch=0)
    sessions = client.open([PROMPT, [5, 6, 7], PROMPT])
    new = [TEXT[: fork - 3], [99], TEXT[: fork + 1]]
    drafts = client.step(sessions, new, max_tokens=8, verify_cost=0.0, runners_up=True)
    for draft, begin in ((drafts[0], fork - 3), (drafts[2], fork + 1)):
        assert draft.tokens.tolist() == TEXT[begin : begin + 8]
        assert draft.runners_up is not None
        others, probs = draft.runners_up
        expected = [7 if begin + i == fork else -1 for i in range(8)]
        assert others.tolist() == expected
        assert [p > 0 for p in probs.tolist()] == [token == 7 for token in expected]
        assert (probs + draft.probs <= 1.1).all()
    assert (len(drafts[1]), drafts[1].runners_up) == (0, None)
    (again,) = client.step(sessions[:1], [[]], max_tokens=8, verify_cost=0.0)
    assert again.tokens.tolist() == drafts[0].tokens.tolist()
    assert again.runners_up is None


@pytest.mark.asyncio
async def test_a_worker_with_a_drafter_of_its_own_says_what_it_verified(shared_server: Server) -> None:
    """Both faces: three tokens of its own drafter, of which two were right, and none of the draft from here."""
    for face in ("threads", "asyncio"):
        where: dict[str, Any] = {
            "endpoint": shared_server.endpoint,
            "namespace": f"own-drafter-{face}",
            "deadline": PATIENT,
        }
        report: dict[str, Any] = {"verified": [0], "model_drafted": [3], "model_accepted": [2]}
        if face == "threads":
            with DraftClient(**where) as client:
                sessions = client.open([PROMPT])
                client.step(sessions, [TEXT[:1]], verified=[0], model_drafted=[0], model_accepted=[0])
                client.step(sessions, [TEXT[1:4]], **report)
        else:
            async with AsyncDraftClient(**where) as other:
                sessions = await other.open([PROMPT])
                await other.step(sessions, [TEXT[:1]], verified=[0], model_drafted=[0], model_accepted=[0])
                await other.step(sessions, [TEXT[1:4]], **report)
        drafted, accepted, undrafted, generated = (
            shared_server.total(f"histospec_{name}_total", namespace=where["namespace"], **labels)
            for name, labels in (
                ("source_draft_tokens", {"source": "model"}),
                ("source_accepted_tokens", {"source": "model"}),
                ("undrafted_tokens", {}),
                ("generated_tokens", {}),
            )
        )
        assert (drafted, accepted, undrafted, generated) == (3, 2, 0, 4)


def test_a_trainer_goes_back_to_a_checkpoint(client: DraftClient) -> None:
    """Newer responses are gone from the store and from drafts; the older ones draft again at their next visit."""
    old, new = TEXT[:30], [1000 + token for token in TEXT[:30]]
    for epoch, text in ((0, old), (1, [*old, 7]), (2, new), (3, [*new, 7])):
        client.ingest(PROMPT, [Response(text)], epoch=epoch)
    assert client.rewind(1) == 2
    assert [r.epoch for r in client.history(PROMPT)] == [0, 1]
    eventually(lambda: drafted(client, old[:5]) == old[5:8], "the history does not come back")
    assert client.predict_length(PROMPT).observations == 2
    assert drafted(client, new[:5]) != new[5:8]
    client.ingest(PROMPT, [Response([5, 6])])
    assert client.history(PROMPT)[-1].epoch == 1  # the newest that the namespace has seen
    with pytest.raises(ValueError, match="epoch"):
        client.rewind(-1)


def drafted(client: DraftClient, text: list[int]) -> list[int]:
    (session,) = client.open([PROMPT])
    client.step([session], [[]], max_tokens=0)
    (draft,) = client.step([session], [text])
    client.close([session], commit=False)
    tokens: list[int] = draft.tokens[:3].tolist()
    return tokens


def test_a_session_goes_on_after_what_was_generated_before(client: DraftClient) -> None:
    """It drafts as if it had generated that text, and commits it with the rest."""
    client.ingest(PROMPT, [Response(TEXT)], epoch=0)
    begun, fresh = client.open([PROMPT, PROMPT], generated=[TEXT[:6], []])
    (draft,) = client.step([begun], [[]])
    assert draft.tokens[:3].tolist() == TEXT[6:9]
    client.step([begun, fresh], [TEXT[6:8], [7]])
    client.close([begun, fresh], logprobs=[[-1.0] * 8, [-2.0]])
    assert texts(client.history(PROMPT)) == [TEXT, TEXT[:8], [7]]
    assert np.shape(np.asarray(client.history(PROMPT)[1].logprobs)) == (8,)


def test_ingest_keeps_everything_about_a_response(client: DraftClient) -> None:
    responses = [
        Response([1, 2, 3], logprobs=[-0.5, -0.25, -1.0], reward=0.75),
        Response(np.array([4, 5], np.int64), generated=[True, False]),
    ]
    client.ingest(PROMPT, responses, epoch=3)
    client.ingest(PROMPT, [Response([9])], epoch=4, problem="elsewhere")
    first, second = client.history(PROMPT)
    assert isinstance(first.tokens, np.ndarray)
    assert (first.tokens.dtype.name, first.tokens.tolist()) == ("int32", [1, 2, 3])
    assert np.asarray(first.logprobs).tolist() == [-0.5, -0.25, -1.0]
    assert (first.reward, first.epoch, first.generated) == (0.75, 3, None)
    assert np.asarray(second.generated).tolist() == [True, False]
    assert (second.reward, second.logprobs) == (None, None)
    assert texts(client.history([1], problem="elsewhere")) == [[9]]
    assert texts(client.history(PROMPT, limit=1)) == [[4, 5]]
    assert client.history([99]) == []


def test_seeds_travel_with_responses(client: DraftClient) -> None:
    """Ingested with their own, in place of their own, and with those of many problems; committed with the session's."""
    client.ingest(PROMPT, [Response([1], seed=-(2**63)), Response([2])])
    client.ingest(PROMPT, [Response([3], seed=5), Response([4], seed=6)], seeds=np.array([2**63 - 1, 0]))  # type: ignore[arg-type]
    client.ingest(PROMPT, [Response([5], seed=5)], seeds=[None])
    client.ingest_many([PROMPT, [9]], [[Response([6], seed=8)], [Response([7])]], seeds=[None, [9]])
    sessions = client.open([PROMPT] * 2, seeds=[-3, None])
    client.step(sessions, [[8], [9]], max_tokens=0)
    client.close(sessions)
    seeds = {r.tokens[0]: r.seed for r in client.history(PROMPT)}
    assert seeds == {1: -(2**63), 2: None, 3: 2**63 - 1, 4: 0, 5: None, 6: 8, 8: -3, 9: None}
    assert [r.seed for r in client.history([9])] == [9]


def test_close_says_epoch_reward_and_logprobs(client: DraftClient) -> None:
    a, b, c = client.open([PROMPT] * 3)
    client.step([a, b, c], [[1, 2], [3], [4]])
    client.close([a, b], epochs=[5, 6], rewards=[0.5, None], logprobs=[[-1.0, -2.0], None])
    client.close([c], commit=False)
    first, second = sorted(client.history(PROMPT), key=lambda r: r.epoch or 0)
    assert (list(first.tokens), first.epoch, first.reward) == ([1, 2], 5, 0.5)
    assert np.asarray(first.logprobs).tolist() == [-1.0, -2.0]
    assert (list(second.tokens), second.epoch, second.reward, second.logprobs) == ([3], 6, None, None)
    assert client.stats().commits == 2


def test_big_ingest_is_spread_over_messages(shared_server: Server) -> None:
    limits = histospec.client.Limits(message_bytes=10_000)
    with DraftClient(shared_server.endpoint, "big", limits=limits) as client:
        client.ingest(PROMPT, [Response(range(i, i + 1000)) for i in range(20)], epoch=1)
        assert [r.tokens[0] for r in client.history(PROMPT)] == list(range(20))


def test_drafts_follow_the_order_of_the_sessions(client: DraftClient) -> None:
    for p in range(8):
        client.ingest([p, p, p], [Response([1000 * p + i for i in range(30)])])
    sessions = client.open([[p, p, p] for p in range(8)])
    drafts = client.step(sessions[::-1], [[1000 * p, 1000 * p + 1, 1000 * p + 2] for p in reversed(range(8))])
    assert [d.tokens[0] for d in drafts] == [1000 * p + 3 for p in reversed(range(8))]
    assert all(len(d.tokens) == len(d.probs) and d.tokens.dtype == np.int32 for d in drafts)
    assert client.step([], []) == []


def test_send_and_receive_may_overlap(client: DraftClient) -> None:
    """Two steps at the same time, collected in reverse order."""
    client.ingest(PROMPT, [Response(TEXT)])
    a, b = client.open([PROMPT] * 2)
    first, second = client.send([a], [TEXT[:4]]), client.send([b], [TEXT[:10]])
    assert client.receive(second)[0].tokens[0] == TEXT[10]
    assert client.receive(first)[0].tokens[0] == TEXT[4]


def test_the_drafts_of_an_answer_are_made_once(client: DraftClient) -> None:
    client.ingest(PROMPT, [Response(TEXT)])
    pending = client.send(client.open([PROMPT]), [TEXT[:4]])
    drafts = client.receive(pending)
    assert drafts[0].tokens[0] == TEXT[4]
    assert pending.drafts() is drafts


def test_flush_tells_the_server_of_opens(client: DraftClient, shared_server: Server) -> None:
    name = f'histospec_problem_lookups_total{{namespace="{client.config.namespace}",result="miss"}}'
    client.open([PROMPT] * 3)
    client.flush()
    eventually(lambda: shared_server.metrics().get(name) == 3)


def test_a_flush_waits_for_what_a_step_has_sent(client: DraftClient) -> None:
    """The commits went with a step's message: there is nothing more to send, but something to wait for."""
    prompts = [[91, number] for number in range(64)]
    sessions = client.open(prompts)
    client.step(sessions, [TEXT[:4]] * 64)
    client.close(sessions)
    client.step(client.open([[92]]), [[1]], max_tokens=0)
    client.flush(20.0)
    assert client.stats().pending_commits == 0


def test_length_topology_and_drop(client: DraftClient, shared_server: Server) -> None:
    client.ingest(PROMPT, [Response(range(n)) for n in (10, 20, 30)])
    prediction = client.predict_length(PROMPT, quantiles=[0.5])
    assert prediction.quantiles.tolist() == [0.5]
    assert 10 <= prediction.lengths[0] <= 30
    assert prediction.observations == 3
    assert client.predict_length(PROMPT, generated=100).lengths.tolist() == []
    (shard,) = client.topology()
    assert isinstance(shard, Shard)
    assert client.drop_namespace() == 3
    assert client.history(PROMPT) == []


def test_lengths_of_a_batch(client: DraftClient) -> None:
    """As one by one: problems by prompt and by name, each with its own start."""
    other, named = [*PROMPT, 1], "a name"
    client.ingest(PROMPT, [Response(range(n)) for n in (10, 20, 30)])
    client.ingest(other, [Response(range(n)) for n in (100, 300)])
    client.ingest(PROMPT, [Response(range(7))], problem=named)
    prompts, problems, generated = [PROMPT, other, PROMPT, PROMPT], [None, None, named, None], [0, 150, 0, 1000]
    found = client.predict_lengths(prompts, problems, generated, [0.5, 1])
    assert [p and (p.quantiles.tolist(), p.lengths.tolist(), p.observations) for p in found] == [
        ([0.5, 1], [20, 30], 3), ([0.5, 1], [300, 300], 1), ([0.5, 1], [7, 7], 1), ([0.5, 1], [], 0),
    ]  # fmt: skip
    for prediction, prompt, problem, begun in zip(found, prompts, problems, generated, strict=True):
        alone = client.predict_length(prompt, problem, begun, [0.5, 1])
        assert prediction is not None
        assert prediction.lengths.tolist() == alone.lengths.tolist()
    assert client.predict_lengths([]) == []
    (defaults,) = client.predict_lengths([PROMPT])
    assert defaults is not None
    assert defaults.quantiles.tolist() == [0.1, 0.5, 0.9, 0.99]


def test_inside_a_running_loop(client: DraftClient) -> None:
    """The blocking client in a thread with a running event loop, as in a notebook or an async trainer."""

    async def main() -> None:
        client.ingest(PROMPT, [Response(TEXT)])
        sessions = client.open([PROMPT])
        assert client.step(sessions, [TEXT[:5]])[0].tokens[0] == TEXT[5]

    asyncio.run(main())


@pytest.mark.asyncio
async def test_async_face(shared_server: Server) -> None:
    async with AsyncDraftClient(shared_server.endpoint, "async", deadline=PATIENT) as client:
        await client.ingest(PROMPT, [Response(TEXT)], epoch=1, seeds=[1])
        sessions = await client.open([PROMPT] * 4, seeds=range(2, 6))
        steps = [client.step([s], [TEXT[: i + 3]]) for i, s in enumerate(sessions)]
        drafts = await asyncio.gather(*steps)  # at once, each in its own message
        assert [d.tokens[0] for (d,) in drafts] == TEXT[3:7]
        await client.close(sessions)
        assert sorted(r.seed or 0 for r in await client.history(PROMPT)) == [1, 2, 3, 4, 5]
        assert (await client.predict_length(PROMPT)).observations == 5
        both = await client.predict_lengths([PROMPT, [99]])
        assert [p and p.observations for p in both] == [5, 5]  # the second problem is unknown: from the namespace
        assert await client.topology()
        assert await client.drop_namespace() == 5
        assert client.stats().late == 0


@pytest.mark.asyncio
async def test_cancelled_step_leaves_the_client_whole(odd_server: OddServer) -> None:
    odd_server.answer = lambda request, context: None
    async with AsyncDraftClient(odd_server.endpoint, "run", deadline=PATIENT) as client:
        sessions = await client.open([PROMPT])
        task = asyncio.create_task(client.step(sessions, [[1]]))
        await until(lambda: odd_server.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        odd_server.answer = odd_server.draft
        assert len((await client.step(sessions, [[2]]))[0]) == 1
        assert client.stats().late == 0


def test_many_threads_share_one_client(shared_server: Server) -> None:
    """Each thread sees its own sessions' drafts, while others ingest and open and close."""
    rounds, errors = 30, list[BaseException]()
    with DraftClient(shared_server.endpoint, "threads", deadline=PATIENT) as client:
        for t in range(6):
            client.ingest([t], [Response([1000 * t + i for i in range(200)])])

        def worker(t: int) -> None:
            try:
                for r in range(rounds):
                    sessions = client.open([[t], [t]])
                    start = r % 50
                    new = [1000 * t + i for i in range(start, start + 8)]
                    pending = client.send(sessions, [new, new])
                    if r % 7 == 0:
                        client.ingest([500 + t], [Response([r, r, r])])
                    for draft in client.receive(pending):
                        assert draft.tokens[0] == new[-1] + 1
                    client.close(sessions, commit=False)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=worker, args=(t,)) for t in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert client.stats().drafts == 6 * rounds * 2
        assert client.stats().late == client.stats().failed == 0


def test_a_waiting_thread_holds_up_nobody(odd_server: OddServer) -> None:
    """One thread waits until its deadline for an answer that never comes; steps of another thread succeed meanwhile."""
    odd_server.answer = lambda request, context: None if len(request.step.sessions) == 16 else odd_server.draft(request)
    with DraftClient(odd_server.endpoint, "run", deadline=2) as client:
        one, two, three = client.open([[1], [2], [3]])
        client.step([three], [[1]])
        stuck = threading.Thread(target=client.step, args=([one, two], [[1], [1]]))
        stuck.start()
        steps = 0
        while stuck.is_alive():
            assert len(client.step([three], [[1]])[0]) == 1
            steps += 1
        assert steps > 10


def test_public_names() -> None:
    assert all(hasattr(histospec.client, name) for name in histospec.client.__all__)
    assert {"DraftClient", "AsyncDraftClient", "Response", "Draft"} <= set(histospec.client.__all__)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_those_of_the_drafts(seed: int) -> None:
    """Of steps that several shards answer in several messages, in any order, some of them never."""
    chance = np.random.default_rng(seed)
    size = int(chance.integers(1, 12))
    pending = Pending(size, deadline=0.0)
    owners = chance.integers(0, 3, size)
    for shard in range(3):
        part = Part(np.flatnonzero(owners == shard).tolist(), begun=0.0)
        pending.parts.append((None, part))
        pieces = chance.integers(0, 3, len(part.rows))
        for piece in chance.permutation(2):  # the third is late
            rows = np.flatnonzero(pieces == piece).tolist()
            offsets = np.append(0, chance.integers(0, 4, len(rows)).cumsum()).tolist()
            tokens = chance.integers(0, 10, offsets[-1]).astype(np.int32)
            part.drafts.append((rows, Drafts(offsets, tokens, np.ones(len(tokens), np.float32), 0, None)))
    drafts = [draft.tokens.tolist() for draft in pending.drafts()]
    assert pending.tokens(vocabulary=10) == drafts
    assert pending.tokens(vocabulary=7) == [draft if max(draft, default=0) < 7 else [] for draft in drafts]


@pytest.mark.asyncio
async def test_a_caller_that_reads_the_drafts_itself(client: DraftClient) -> None:
    roll_out(client, PROMPT, TEXT)
    pending = client.send(client.open([PROMPT] * 2), [[], TEXT[:3]], max_tokens=4)
    client.wait(pending)
    assert pending.tokens(vocabulary=1000) == [TEXT[:4], TEXT[3:7]]
    with pytest.raises(ValueError, match="pending: must be"):
        client.wait(None)  # type: ignore[arg-type]
    async with AsyncDraftClient(client.config.endpoints[0].address, client.config.namespace, deadline=PATIENT) as other:
        pending = await other.send(await other.open([PROMPT]), [TEXT[:1]], max_tokens=4)
        await other.wait(pending)
        assert pending.tokens(vocabulary=1000) == [TEXT[1:5]]
