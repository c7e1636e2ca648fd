"""Generations that are aborted and go on with prompt and partial text as prompt: one response to the first prompt."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.client import DraftClient
from histospec.client.config import Timeouts
from histospec.protocol import alternatives
from tests.support.clients import flushed, texts
from tests.support.rollouts import NAMES
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

PROMPTS = [[7, 7, p] for p in range(8)]
TEXT = list(range(100, 160))


@pytest.fixture(scope="module")
def shards(start_shared: Starter) -> list[Server]:
    return [start_shared("--shard-name", name) for name in NAMES]


@pytest.fixture
def workers(shards: list[Server], request: pytest.FixtureRequest) -> Iterator[list[DraftClient]]:
    """Three workers of three shards that do not know of each other."""
    endpoint = ",".join(f"{name}={shard.endpoint}" for name, shard in zip(NAMES, shards, strict=True))
    with contextlib.ExitStack() as stack:
        made = [DraftClient(endpoint, request.node.name, timeouts=Timeouts(step=30.0, shutdown=60.0)) for _ in range(3)]
        yield [stack.enter_context(client) for client in made]


def write(client: DraftClient, prompts: list[list[int]], text: list[int], **options: Any) -> list[int]:
    """Opens sessions that write this text, a few tokens a step."""
    sessions = client.open(prompts, **options)
    for start in range(0, len(text), 7):
        client.step(sessions, [text[start : start + 7]] * len(prompts))
    return sessions


def abort(client: DraftClient, sessions: list[int]) -> None:
    client.finish(sessions, commit=False, aborted=True)
    flushed(client)


def responses(client: DraftClient, prompts: list[list[int]], problems: Any = None) -> list[list[list[int]]]:
    return [texts(found) for found in client.histories(prompts, problems=problems)]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("problem", [None, "p"])
def test_parts_of_three_workers_are_one_response(workers: list[DraftClient], same: bool, problem: str | None) -> None:
    """Each worker continues what another one, or it itself, has aborted; the last part commits the whole."""
    problems = [problem and f"{problem}{i}" for i in range(len(PROMPTS))]
    cuts = [0, 20, 45, 60]
    for part, (start, end) in enumerate(itertools.pairwise(cuts)):
        client = workers[0 if same else part]
        sessions = write(client, [[*p, *TEXT[:start]] for p in PROMPTS], TEXT[start:end], problems=problems)
        if end < 60:
            abort(client, sessions)
        else:
            client.finish(sessions, epochs=3)
            flushed(client)
    assert responses(client, PROMPTS, problems) == [[TEXT]] * 8
    stored = client.history(PROMPTS[0], problem=problems[0])
    assert [r.epoch for r in stored] == [3]
    if problem is None:
        assert responses(client, [[*p, *TEXT[:end]] for p in PROMPTS for end in cuts[1:3]]) == [[]] * 16


def test_a_response_that_goes_on_drafts_from_its_prompts_history(workers: list[DraftClient]) -> None:
    first, second, _ = workers
    first.finish(write(first, PROMPTS, TEXT))
    abort(first, write(first, PROMPTS, TEXT[:20]))
    sessions = second.open([[*p, *TEXT[:20]] for p in PROMPTS])
    eventually(
        lambda: all(
            draft.tokens.tolist()[:4] == TEXT[20:24] for draft in second.step(sessions, [[]] * 8, verify_cost=0.0)
        ),
        "no draft continues the aborted response",
    )


def test_siblings_with_one_text_go_on_each_for_itself(workers: list[DraftClient]) -> None:
    """n > 1: two of three were aborted with the same text, and differ later."""
    first, second, _ = workers
    abort(first, write(first, [PROMPTS[0]] * 2, TEXT[:10]))
    abort(first, write(first, [PROMPTS[0]], TEXT[:5] + [9] * 5))
    begun = [*PROMPTS[0], *TEXT[:10]]
    for last in (1, 2):
        second.finish(write(second, [begun], [last] * 5))
    second.finish(write(second, [[*PROMPTS[0], *TEXT[:5], *[9] * 5]], [3] * 5))
    flushed(second)
    expected = [[*TEXT[:10], *[1] * 5], [*TEXT[:10], *[2] * 5], [*TEXT[:5], *[9] * 5, *[3] * 5]]
    assert sorted(responses(second, [PROMPTS[0]])[0]) == sorted(expected)


def test_the_trainer_may_have_less_than_the_engine_wrote(workers: list[DraftClient]) -> None:
    first, second, _ = workers
    abort(first, write(first, PROMPTS, TEXT[:30]))
    for prompt, received in zip(PROMPTS, (1, 5, 10, 15, 20, 25, 29, 30), strict=True):
        second.finish(write(second, [[*prompt, *TEXT[:received]]], [5] * 9))
    flushed(second)
    assert responses(second, PROMPTS) == [[[*TEXT[:k], *[5] * 9]] for k in (1, 5, 10, 15, 20, 25, 29, 30)]


def test_a_close_that_overtakes_the_answer_commits_the_whole(workers: list[DraftClient]) -> None:
    """The second worker commits before it has read that its sessions continue others."""
    first, second, _ = workers
    abort(first, write(first, PROMPTS, TEXT[:30]))
    sessions = second.open([[*p, *TEXT[:30]] for p in PROMPTS])
    second.send(sessions, [TEXT[30:]] * 8)
    places = [None] * 29 + [alternatives.Place(0.5, [(7, 0.25)])]
    second.finish(
        sessions, rewards=1.0, logprobs=[np.zeros(30, np.float32)] * 8, alternatives=[alternatives.pack(places)] * 8
    )
    flushed(second)
    assert responses(second, PROMPTS) == [[TEXT]] * 8
    (stored,) = second.history(PROMPTS[0])
    assert (stored.reward, stored.logprobs) == (1.0, None)


def test_a_worker_knows_what_it_aborted_when_the_server_has_forgotten_it(
    start_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a session begins with tokens: a scheduler opens one for each whole response, to commit it."""
    server = start_server()
    recorded = tmp_path / "recorded.jsonl"
    monkeypatch.setenv("HISTOSPEC_RECORD", str(recorded))
    with DraftClient(server.endpoint, "run", timeouts=Timeouts(step=30.0, shutdown=60.0)) as client:
        abort(client, write(client, PROMPTS, TEXT[:30]))
        server.restart()
        begun = [[*p, *TEXT[:30]] for p in PROMPTS]
        client.finish(client.open(begun, generated=[TEXT[30:]] * 8), epochs=3)
        flushed(client)
        assert responses(client, PROMPTS) == [[TEXT]] * 8
        assert responses(client, begun) == [[]] * 8
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [(line["prompt"], line["tokens"]) for line in lines] == [(prompt, TEXT) for prompt in PROMPTS]


def test_what_is_dropped_is_not_continued(workers: list[DraftClient]) -> None:
    first, second, _ = workers
    abort(first, write(first, PROMPTS, TEXT[:30]))
    second.finish(write(second, PROMPTS[:1], [1]))
    flushed(second)
    second.drop_namespace()
    begun = [[*p, *TEXT[:30]] for p in PROMPTS]
    second.finish(write(second, begun, TEXT[30:]))
    flushed(second)
    assert responses(second, begun) == [[TEXT[30:]]] * 8


def test_an_aborted_response_cannot_be_committed(workers: list[DraftClient]) -> None:
    sessions = write(workers[0], PROMPTS, TEXT[:5])
    with pytest.raises(ValueError, match=r"aborted: .* commit=False"):
        workers[0].finish(sessions, aborted=True)
    workers[0].finish(sessions, commit=False)
