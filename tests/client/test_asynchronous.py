"""Asks, late answers and lengths of drafts under asynchronous scheduling, without vLLM, against naive references."""

import itertools
import random
from collections.abc import Iterable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.client import Draft, DraftClient
from histospec.client.engines.options import Bounds, RequestOptions
from histospec.client.vllm.asynchronous.asking import Asking, Begun
from histospec.client.vllm.asynchronous.texts import Text, rest
from tests.support.asynchronous import Client, draft_of

LONGEST = 4
PROMPT = [1, 2]


class Schedule:
    """Runs `Asking` as vLLM would, and says what a naive reader of all that was sent and answered would draft."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.client = Client(self.draft, lambda: self.chance.choice((0, 0, 1, 2, None)))
        self.asking = Asking(cast(DraftClient, self.client), LONGEST, 100)
        self.texts: dict[str, list[int]] = {}  # of the running requests, as the device has them
        self.bounds: dict[str, Bounds] = {}
        self.paused: dict[str, list[int]] = {}  # of the preempted ones, as the scheduler has them
        self.outcome: tuple[list[str], list[list[int]]] | None = None  # of the step before
        self.number = 0
        self.steps = itertools.count(1)

    def draft(self, text: list[int]) -> Draft:
        # Few different tokens, so that wrong drafts often agree.
        return draft_of(self.chance.choices((3, 4), k=self.chance.randint(0, 2 * LONGEST)))

    def step(self) -> None:
        chance = self.chance
        ended = [each for each in self.texts if chance.random() < 0.1]
        resumed = [each for each in self.paused if chance.random() < 0.5]
        begun = []
        for each in ended:
            text = self.texts.pop(each)
            if chance.random() < 0.5:  # preempted; its last step may be dropped
                kept = max(len(PROMPT), len(text) - chance.choice((0, 0, 1, 3)))
                self.paused[each] = text[:kept]
                if chance.random() < 0.5:
                    resumed.append(each)
        for each in resumed:
            self.texts[each] = self.paused.pop(each)
        if len(self.texts) < 3:
            self.number += 1
            resumed.append(f"r{self.number}")
            self.texts[resumed[-1]] = list(PROMPT)
            self.bounds[resumed[-1]] = Bounds(chance.choice((0, 0, 8)), chance.choice((6, 20, 100)))
        for each in resumed:
            text = self.texts[each]
            begun.append(Begun(each, text, len(text) - len(PROMPT), RequestOptions(), self.bounds[each]))
        some = [each for each in self.texts if each not in resumed and chance.random() < 0.6]
        places = {each: chance.randint(1, LONGEST) for each in some}
        cost = None if chance.random() < 0.1 else 0.05
        drafts, _ = self.asking.step(next(self.steps), ended, begun, places, cost)
        assert {each: draft.tokens.tolist() for each, draft in drafts.items()} == self.expected(places)
        requests = [each for each in self.texts if chance.random() < 0.8]
        sampled = [chance.choices((3, 4), k=chance.randint(0, LONGEST + 1)) for _ in requests]
        for each, tokens in zip(requests, sampled, strict=True):
            self.texts[each] += tokens
        self.asking.sampled(requests, lambda: sampled)

    def session(self, request: str) -> int:
        session: int = self.asking._sessions._sessions[request].id
        return session

    def expected(self, places: dict[str, int]) -> dict[str, list[int]]:
        found = {}
        for each, number in places.items():
            text, newest = self.texts[each], None
            for step in self.client.steps:
                for row, read in enumerate(step.texts):
                    mine = step.sessions[row] == self.session(each) and row in step.rows
                    if mine and (newest is None or len(read) >= len(newest[0])):
                        newest = read, [*read, *step.found[row].tokens.tolist()]
            number = min(number, usable(self.bounds[each], len(text) - len(PROMPT)))
            if number and newest is not None and newest[1][: len(text)] == text and len(newest[1]) > len(text):
                found[each] = newest[1][len(text) :][:number]
        return found


def usable(bounds: Bounds, length: int) -> int:
    """The longest draft after which the step's own token is still within the most, and none is in doubt: of the tokens
    that a step adds, all come before the fewest, or the first one comes after it."""
    certain = [
        drafted
        for drafted in range(LONGEST + 1)
        if length + drafted + 1 <= bounds.most and (length >= bounds.fewest or length + drafted + 1 <= bounds.fewest)
    ]
    return max(certain, default=0)


@settings(max_examples=1_000)
@given(st.integers(0, 2**32))
def test_random_schedules_draft_what_a_naive_reader_would(seed: int) -> None:
    """
    1. Requests begin, end, are preempted and resume, with tokens dropped; answers come at once, late, or never.
    2. Each draft is what the newest answer for this text has left, if it agrees with what was sampled since.
    3. At the end every session is closed.
    """
    run([seed])


@pytest.mark.long
@settings(max_examples=10_000)
@given(st.integers(0, 2**32))
def test_ten_thousand_of_them(seed: int) -> None:
    run([seed])


def run(seeds: Iterable[int]) -> None:
    for seed in seeds:
        schedule = Schedule(seed)
        for _ in range(12):
            schedule.step()
        schedule.asking.step(next(schedule.steps), list(schedule.texts), [], {}, 0.05)
        assert schedule.client.texts == {}


def test_a_reader_that_forgets_what_was_sampled_since_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of the test above."""
    monkeypatch.setattr(Text, "since", lambda self, end: [])
    with pytest.raises(AssertionError):
        run(range(200))


def test_drafts_that_no_step_verifies() -> None:
    """
    1. They are asked for in step 3, which has no places; step 4 takes them.
    2. The message of step 4 says that none was verified, and what a drafted token costs.
    """
    said: list[tuple[int, float, Any]] = []

    class Telling(Client):
        def send(
            self, sessions: Any, new_tokens: Any, max_tokens: int = 16, verify_cost: float = 0, **more: Any
        ) -> Any:
            said.append((max_tokens, verify_cost, more.get("verified")))
            return super().send(sessions, new_tokens, max_tokens, verify_cost, **more)

    asking = Asking(cast(DraftClient, Telling(lambda text: draft_of([3, 4]))), LONGEST, 100)
    begun = [Begun("r", PROMPT, 0, RequestOptions(), Bounds(0, 100))]
    found = []
    for number, cost in enumerate((None, None, 0.25, None, None), 1):
        _, answers = asking.step(number, [], begun if number == 1 else [], {}, cost, value=0.5)
        found += [(number, answer.step, answer.lengths) for answer in answers]
        asking.sampled(["r"], lambda: [[3]])
    assert found == [(4, 3, [2])]
    assert said == [(0, 0.5, None), (LONGEST, 0.25, [0]), (0, 0.5, [0])]


@pytest.mark.parametrize(
    ("since", "left"),
    [([], [5, 6, 7]), ([5], [6, 7]), ([5, 6], [7]), ([5, 6, 7], None), ([6], None), ([5, 6, 7, 8], None), (None, None)],
)
def test_a_draft_loses_what_was_sampled_since(since: list[int] | None, left: list[int] | None) -> None:
    found = rest(draft_of([5, 6, 7]), since)
    assert (None if found is None else found.tokens.tolist()) == left


def test_a_text_knows_its_last_tokens_only() -> None:
    text = Text("r", 10, Bounds(0, 100))
    text.grow([1, 2, 3], kept=2)
    assert text.since(10) == [1, 2, 3]
    assert text.since(9) is None  # before it began
    assert text.since(14) is None  # a text that it never had
    text.grow([4, 5], kept=2)
    assert (text.length, text.since(13), text.since(12)) == (15, [4, 5], None)
