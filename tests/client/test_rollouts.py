"""SPEC-RL without vLLM: lenience, choice and length of the old response, and the client's calls for batches."""

import asyncio
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from histospec.client import AsyncDraftClient, DraftClient, InvalidRequest, Response
from histospec.client.rollouts import Geometric, Rollout, SpeculativeRollout
from histospec.client.rollouts.acceptance import lenience_of
from histospec.client.rollouts.old import ResponseLimits, choose, cut, outside
from tests.support.clients import texts
from tests.support.servers import Server, Starter

LIMITS = ResponseLimits(most=10, scored=20, least=0, stops=frozenset({0}))


def response(tokens: list[int], **fields: Any) -> Response:
    return Response(tokens, logprobs=-np.arange(len(tokens), dtype=np.float32), **fields)


def test_a_schedule_moves_by_the_same_factor_each_epoch() -> None:
    schedule = Geometric(start=8.0, end=1.0, epochs=3)
    assert [schedule(epoch) for epoch in range(5)] == pytest.approx([8, 4, 2, 1, 1])
    assert Geometric(1, 1, 1)(5) == 1
    assert lenience_of(schedule, 1) == pytest.approx(4)
    assert [lenience_of(x, None) for x in (0, 1, math.inf)] == [0, 1, math.inf]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 3), "start: is 0"),
        ((1, math.inf, 3), "end: is inf"),
        ((1, math.nan, 3), "end: is nan"),
        ((1, 1, 0), "epochs: is 0"),
    ],
)
def test_schedules_that_make_no_sense(arguments: tuple[int, int, int] | tuple[int, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometric(*arguments)


def test_lenience_is_a_number_or_needs_an_epoch() -> None:
    with pytest.raises(ValueError, match="lenience: is -1"):
        SpeculativeRollout(None, cast(DraftClient, None), -1)
    with pytest.raises(ValueError, match="lenience: is nan"):
        lenience_of(lambda epoch: math.nan, 0)
    with pytest.raises(ValueError, match="epoch: is None; a schedule of the lenience needs an epoch"):
        lenience_of(Geometric(2, 1, 3), None)


def test_newest_responses_with_logprobs_are_taken_once() -> None:
    stored = [
        response([1], epoch=0),
        response([2], epoch=2),
        response([3], epoch=1),
        Response([4], epoch=3),  # of a worker: without logprobs
        response([5, 6], epoch=3, generated=[True, False]),
        response([7], epoch=3, generated=[True]),
    ]
    assert [list(r.tokens) for r in choose(stored, 9, None)] == [[7], [2], [3], [1]]
    assert [list(r.tokens) for r in choose(stored, 2, None)] == [[7], [2]]
    assert [list(r.tokens) for r in choose(stored, 9, 2)] == [[3], [1]]  # earlier epochs alone


@pytest.mark.parametrize(
    ("tokens", "limits", "expected", "ended"),
    [
        ([1, 2, 3], LIMITS, 3, False),  # cut by a shorter limit, then
        ([1, 2, 0], LIMITS, 3, True),
        ([1, 0, 3], LIMITS, 2, True),  # stop tokens are others today
        ([1, 0, 3], LIMITS._replace(least=1), 2, True),
        ([1, 0, 3], LIMITS._replace(least=2), 1, False),
        (range(1, 11), LIMITS, 10, True),
        (range(1, 15), LIMITS, 10, True),
        (range(1, 11), LIMITS._replace(scored=9), 9, False),
        ([1, 2, 0], LIMITS._replace(scored=2), 2, False),
    ],
)
def test_what_could_be_written_today(tokens: Sequence[int], limits: ResponseLimits, expected: int, ended: bool) -> None:
    old = cut(response(list(tokens)), limits)
    assert old is not None
    assert old.tokens.tolist() == list(tokens)[:expected]
    assert old.logprobs.tolist() == [-float(i) for i in range(expected)]
    assert old.ended == ended


def test_nothing_could_be_written() -> None:
    assert cut(response([0, 1]), LIMITS._replace(least=1)) is None
    assert cut(response([1, 2]), LIMITS._replace(scored=0)) is None


def test_a_token_that_the_model_does_not_have() -> None:
    assert outside(response([0, 31]), 32) is None
    assert outside(response([]), 32) is None
    assert outside(response([5, 2**31 - 1, 32]), 32) == 2**31 - 1


def test_it_needs_no_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import histospec.client.rollouts"
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def client(server: Server) -> Iterator[DraftClient]:
    with DraftClient(server.endpoint, "run") as client:
        yield client


def test_histories_of_many(client: DraftClient) -> None:
    prompts = [[i, 1] for i in range(50)]
    responses = [[response([i, j], reward=float(j)) for j in range(3)] for i in range(50)]
    assert client.ingest_many(prompts, responses, epoch=4) == [True] * 50
    histories = client.histories([*prompts, [9, 9]], limit=2)
    assert [texts(h) for h in histories[:50]] == [[[i, 1], [i, 2]] for i in range(50)]
    assert histories[50] == []
    assert {(r.epoch, r.reward) for h in histories for r in h or []} == {(4, 1.0), (4, 2.0)}
    named = client.ingest_many(prompts[:2], responses[:2], epoch=5, problems=["p", None])
    assert named == [True, True]
    assert [len(texts(h)) for h in client.histories(prompts[:2], ["p", None])] == [3, 6]


def test_many_bad_arguments(client: DraftClient) -> None:
    with pytest.raises(ValueError, match="responses: 1 values for 2 prompts"):
        client.ingest_many([[1], [2]], [[]])
    with pytest.raises(ValueError, match="problems: 1 values for 2 prompts"):
        client.histories([[1], [2]], ["p"])
    with pytest.raises(ValueError, match=r"prompts\[1\]: must not be empty") as caught:
        client.ingest_many([[1], []], [[response([1])], [response([2])]])
    assert not isinstance(caught.value, InvalidRequest)
    assert client.history([1]) == []


def test_a_shard_that_is_gone_costs_its_own_problems(start_server: Starter, caplog: pytest.LogCaptureFixture) -> None:
    here, gone = start_server("--shard-name", "a"), start_server("--shard-name", "b")
    endpoint = f"a={here.endpoint},b={gone.endpoint}"
    prompts = [[i, 2] for i in range(60)]

    async def ask() -> Any:
        async with AsyncDraftClient(endpoint, "run") as client:
            histories = await client.histories(prompts)
            lengths = [p is not None for p in await client.predict_lengths(prompts)]
            return histories, await client.ingest_many(prompts, [[response([7])] for _ in prompts]), lengths

    with DraftClient(endpoint, "run") as client:
        assert all(client.ingest_many(prompts, [[response([5])] for _ in prompts]))
        gone.kill()
        histories = client.histories(prompts)
        assert {None if h is None else len(h) for h in histories} == {None, 1}
        assert sum("not asked again" in r.getMessage() for r in caplog.records) == 1
        stored = client.ingest_many(prompts, [[response([6])] for _ in prompts])
        assert stored == [h is not None for h in histories]
        assert [p and p.observations for p in client.predict_lengths(prompts)] == [2 if ok else None for ok in stored]
        seen, done, lengths = asyncio.run(ask())
        assert [h is not None for h in seen] == done == stored == lengths
        assert [None if h is None else texts(h) for h in client.histories(prompts)] == [
            [[5], [6], [7]] if ok else None for ok in stored
        ]


def test_a_policy_that_diverges_loses_no_response(client: DraftClient) -> None:
    """Its rewards and log-probabilities are NaN."""
    scores = [np.array([-1, -2], np.float32), np.array([-1, math.nan], np.float32)]
    text = np.array([5, 6], np.int32)
    rollouts = [
        Rollout(text, logprobs, 0, 2, "stop", prompt=np.array([number], np.int32), epoch=0)
        for number, logprobs in enumerate(scores)
    ]
    assert SpeculativeRollout(None, client).commit(rollouts, [math.nan, 1.0]) == 2
    (first,), (second,) = client.history([0]), client.history([1])
    assert (texts([first]), first.reward) == ([[5, 6]], None)
    assert np.array_equal(np.asarray(first.logprobs), scores[0])
    assert (texts([second]), second.reward, second.logprobs) == ([[5, 6]], 1.0, None)
    wrong: Any = [1.0, "good"]
    with pytest.raises(ValueError, match=r"rewards\[1\]: must be numbers"):
        SpeculativeRollout(None, client).commit(rollouts, wrong)
