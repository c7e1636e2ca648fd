"""The choice between the drafts of a model's own drafter and the server's. No vLLM."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from histospec.client import Draft
from histospec.client.engines.options import RequestOptions
from histospec.client.engines.sessions import RequestSessions
from histospec.client.vllm.choice.chooser import LONGER
from histospec.client.vllm.choice.drafts import TOGETHER, Choice, Outcomes, Pairs, Row, levels
from histospec.client.vllm.choice.model_drafter import FEW, HEALS, DrafterCoverage, ModelDrafter
from histospec.client.vllm.choice.modes import REST, Limits

PRICE = 0.1
COST = 0.01


def draft(tokens: Sequence[int], probs: Sequence[float]) -> Draft:
    return Draft(np.array(tokens, np.int32), np.array(probs, np.float32))


def chosen(choice: Choice, history: Draft | None, model: Sequence[int], price: float = PRICE) -> Row:
    (row,), _ = choice.choose(["r"], [history], [model], price)
    return row


def test_a_sure_history_is_kept_and_a_silent_one_gives_way() -> None:
    choice = Choice(16)
    sure = draft([1, 2, 3, 4], [0.95] * 4)
    assert chosen(choice, sure, [7, 8, 9]) == Row([1, 2, 3, 4], 0, False)
    assert chosen(choice, None, [7, 8, 9]) == Row([7, 8, 9], 0, True)
    assert chosen(choice, draft([1], [0.15]), [7, 8, 9]).by_model
    assert chosen(choice, None, []) == Row([], 0, False)


def test_drafts_that_divide_share_what_is_before() -> None:
    row = chosen(Choice(16), draft([1, 2, 3], [0.9, 0.9, 0.1]), [1, 2, 7, 8])
    assert row == Row([1, 2, 7, 8], 2, True)


def test_a_draft_that_goes_on_where_the_other_ends_is_taken() -> None:
    choice = Choice(16)
    assert chosen(choice, draft([1, 2, 3, 4], [0.9] * 4), [1, 2]).tokens == [1, 2, 3, 4]
    assert chosen(choice, draft([1, 2], [0.9] * 2), [1, 2, 3]).tokens == [1, 2, 3]


def test_a_draft_is_cut_where_it_is_worth_no_more() -> None:
    assert chosen(Choice(16), draft([1, 2, 3], [0.9, 0.05, 0.9]), []).tokens == [1]
    long = chosen(Choice(16), None, list(range(16)), price=0.01)
    short = chosen(Choice(16), None, list(range(16)), price=0.2)
    assert len(short.tokens) < len(long.tokens)


PAIR = Pairs(
    history=np.array([[1, -1]], np.int32),
    probs=np.array([[0.6, 0.0]], np.float32),
    model=np.array([[2, -2]], np.int32),
    split=np.array([0]),
    level=levels(np.array([0.6], np.float32)),
    run=np.array([0]),
)
"""Drafts of one token each, 1 and 2, after a rejection."""


def teach(choice: Choice, rng: random.Random, history_right: float, model_right: float, steps: int = 600) -> None:
    """Runs steps of one request in which both drafts differ: at most one is right."""
    for _ in range(steps):
        rows, _ = choice.choose(["r"], [draft([1], [0.6])], [[2]], PRICE)
        at = rng.random()
        came = 1 if at < history_right else 2 if at < history_right + model_right else 3
        right = rows[0].tokens == [came]
        choice.learn(["r"], [[came, 5] if right else [came]], {"r": rows[0]})


@pytest.mark.parametrize(("history_right", "model_right"), [(0.1, 0.8), (0.7, 0.1), (0.3, 0.5)])
def test_what_is_right_more_often_is_learned_whoever_drafted(history_right: float, model_right: float) -> None:
    choice = Choice(16)
    teach(choice, random.Random(0), history_right, model_right)
    assert chosen(choice, draft([1], [0.6]), [2]).by_model == (model_right > history_right)
    (history,), (model,) = choice.outcomes.at_split(PAIR)
    assert abs(model - model_right) < 0.12
    assert abs(history - min(0.6, history_right)) < 0.12  # disagreement never makes the server surer


def test_how_well_the_models_drafts_go_on_is_learned_by_position() -> None:
    choice, rng = Choice(16), random.Random(0)
    right = [0.9, 0.8, 0.3]
    for _ in range(2000):
        rows, _ = choice.choose(["r"], [None], [[1, 2, 3]], 0.0)
        came = []
        for token, chance in zip(rows[0].tokens, right, strict=False):
            came.append(token if rng.random() < chance else 9)
            if came[-1] == 9:
                break
        else:
            came.append(9)
        choice.learn(["r"], [came], {"r": rows[0]})
    assert choice.outcomes.goes_on[1:3] == pytest.approx(right[1:], abs=0.1)


def test_a_request_that_runs_well_is_told_from_one_that_was_just_rejected() -> None:
    """After an accepted draft the model is right; after a rejection it is not. The server never drafts."""
    choice, rng = Choice(4), random.Random(1)
    accepted = False
    for _ in range(2000):
        rows, _ = choice.choose(["r"], [None], [[1]], 0.0)
        accepted = rng.random() < (0.9 if accepted else 0.1)
        choice.learn(["r"], [[1, 5] if accepted else [9]], {"r": rows[0]})
    for came, worth in ([1, 5], True), ([9], False):
        rows, _ = choice.choose(["r"], [None], [[1]], 0.0)
        choice.learn(["r"], [came], {"r": rows[0]})
        assert chosen(choice, None, [1], price=0.5).by_model == worth


def test_the_choice_is_as_good_as_that_of_one_who_knows() -> None:
    """At least 97 % of the accepted tokens of an oracle that knows how often each drafter is right at each level."""
    rng = random.Random(2)
    choice = Choice(4)
    kinds = [(0.05, 0.1, 0.5), (0.4, 0.35, 0.4), (0.8, 0.75, 0.15), (0.97, 0.96, 0.03)]
    got = best = 0.0
    for step in range(4000):
        batch = [rng.choice(kinds) for _ in range(4)]
        ids = [str(i) for i in range(4)]
        rows, _ = choice.choose(ids, [draft([1], [p]) for p, _, _ in batch], [[2]] * 4, 0.0)
        came = []
        for row, (_, history, model) in zip(rows, batch, strict=True):
            at = rng.random()
            token = 1 if at < history else 2 if at < history + model else 3
            came.append([token, 5] if row.tokens == [token] else [token])
            if step > 500:
                got += model if row.by_model else history
                best += max(history, model)
        choice.learn(ids, came, dict(zip(ids, rows, strict=True)))
    assert got >= 0.97 * best


# ---- what the drafter has read --------------------------------------------------------------------------------------


def test_who_lived_through_a_rest_gets_no_drafts_of_the_model() -> None:
    coverage = DrafterCoverage()
    for _ in range(FEW):
        coverage.left_out({"a": False})
    assert coverage.covers("a")
    coverage.left_out({"a": False, "b": True})
    assert not coverage.covers("a")
    assert not coverage.covers("b")
    coverage.cached("c")  # b's prompt may be c's
    assert not coverage.covers("c")
    assert coverage.share(["a", "b", "c", "d"]) == 0.25
    coverage.emptied()
    coverage.cached("d")
    assert coverage.covers("d")
    coverage.forget("a")
    assert coverage.covers("a")


def test_a_short_gap_matters_less_the_more_text_follows_it() -> None:
    """A prompt that the drafter has not read stays a gap."""
    coverage = DrafterCoverage()
    for _ in range(FEW + 2):
        coverage.left_out({"a": False})
    coverage.left_out({"b": True})
    for _ in range(2 * HEALS - 1):
        coverage.ran()
    assert not coverage.covers("a")
    coverage.ran()
    assert coverage.covers("a")
    for _ in range(10**5):
        coverage.ran()
    assert not coverage.covers("b")


# ---- in the steps of an engine --------------------------------------------------------------------------------------


def step(tokens: dict[str, int], drafts: dict[str, list[int]], new: Sequence[str] = (), cached: int = 0) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=cached) for r in new],
        num_spec_tokens_to_schedule=16,
    )


def sampled(rows: dict[str, list[int]]) -> Any:
    return SimpleNamespace(req_ids=list(rows), sampled_token_ids=list(rows.values()))


def test_a_step_is_told_how_many_tokens_to_make() -> None:
    drafter = ModelDrafter(Limits(16, 3), COST)
    now = step({"a": 1}, {})
    drafter.ask(now)
    assert now.num_spec_tokens_to_schedule == 3
    assert drafter.asked == 3


def test_drafts_of_another_length_than_was_asked_for_are_none() -> None:
    """vLLM drafts zeros for every request when one of them nears the end of the context, whatever the step asks for."""
    drafter = ModelDrafter(Limits(4, 2), COST)
    drafter.ask(step({"a": 1, "b": 1}, {}))
    assert drafter.choose(["a", "b"], [None, None], [[7, 8], [-1, 3]], True) == [[7, 8], []]
    assert drafter.choose(["a", "b"], [None, None], [[7, 8, 9], [7]], True) == [[], [7]]
    assert drafter.choose(["a", "b"], [None, None], [[0] * 4, [0] * 4], True) == [[], []]


def test_zeros_are_no_drafts_and_forgotten_with_their_requests() -> None:
    drafter = ModelDrafter(Limits(4, 4), COST)
    for _ in range(FEW + 1):
        drafter.ask(step({"a": 1, "b": 1}, {}))
        assert drafter.choose(["a", "b", "left"], [None] * 3, [[0] * 4] * 3, True) == [[], [], []]
    drafter.ask(step({"a": 1}, {}))
    assert not drafter._coverage.covers("a")
    assert drafter._coverage.covers("left")


def test_where_only_the_model_drafts_all_drafts_are_cut_where_they_are_worth_most() -> None:
    """All tokens are reported as the model's. What was right is learned from many drafts together."""
    drafter = ModelDrafter(Limits(8, 8), 0.05)
    tokens, lengths = list(range(1, 9)), []
    for _ in range(20 * TOGETHER):
        drafter.ask(step({"a": 1}, {}))
        (row,) = drafter.choose(["a"], [None], [tokens], asked=False)
        lengths.append(len(row))
        (told,) = drafter.learn(step({"a": 1 + len(row)}, {"a": row}), sampled({"a": [1, 2, 99]}))
        assert tuple(told) == ("a", 0, len(row), 2)
    assert lengths[0] > 2
    assert set(lengths[-2 * TOGETHER :]) == {2}  # the third is always wrong


def test_drafts_of_the_model_alone_teach_as_much_as_compared_ones() -> None:
    compared, alone, rng = Choice(4), Choice(4), random.Random(3)
    for _ in range(2000):
        right = next((j for j, chance in enumerate((0.7, 0.9, 0.4, 0.8)) if rng.random() >= chance), 4)
        came = [*range(right), 99]
        rows, _ = compared.choose(["r"], [None], [[0, 1, 2, 3]], 0.0)
        compared.learn(["r"], [came], {"r": rows[0]})
        alone.alone([[0, 1, 2, 3]], 0.0)
        alone.learn_alone("r", 4, right)
    assert alone.outcomes.goes_on[1:4] == pytest.approx(compared.outcomes.goes_on[1:4], abs=0.05)
    assert alone.outcomes.alone(0.1) == pytest.approx(compared.outcomes.alone(0.1), abs=0.15)


@pytest.mark.parametrize("price", [0.01, 0.1, 0.5, 0.99])
def test_what_a_draft_of_the_model_alone_is_worth(price: float) -> None:
    outcomes, rng = Outcomes(6), random.Random(1)
    for _ in range(500):
        right = 0 if rng.random() < 0.3 else rng.randint(1, 6)
        came = [*range(1, right + 1), 99, *[-3] * 6][:7]
        pair = Pairs(
            np.full((1, 7), -1, np.int32), np.zeros((1, 7), np.float32), np.array([[*range(1, 7), -2]], np.int32),
            np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64),
        )  # fmt: skip
        outcomes.learn(pair, np.array([came], np.int32), np.array([right + 1]), np.array([True]))
    survival, worth = 1.0, [0.0]
    for j in range(6):
        survival *= float(outcomes.at_split(pair)[1][0]) if j == 0 else float(outcomes.goes_on[j])
        worth.append(worth[-1] + survival - price)
    assert outcomes.alone(price) == pytest.approx(
        worth[1:], abs=0.02
    )  # the prior of requests whose last draft was accepted


def test_a_draft_of_token_0_is_one() -> None:
    drafter = ModelDrafter(Limits(1, 1), COST)
    for _ in range(2):  # and the drafter does not count as left out
        drafter.ask(step({"a": 1, "b": 1}, {}))
        assert drafter.choose(["a", "b"], [None, None], [[0], [5]], True) == [[0], [5]]


def test_the_server_is_told_what_was_verified_of_whose_draft() -> None:
    drafter = ModelDrafter(Limits(16, 3), COST)
    drafter.ask(step({"a": 1, "b": 1, "c": 1, "d": 1}, {}))
    history = [draft([1, 2], [0.9, 0.9]), None, draft([1, 2], [0.9, 0.05]), draft([5], [0.9])]
    rows = drafter.choose(list("abcd"), history, [[7], [7, 8, 9], [1, 7, 8], []], True)
    assert rows == [[1, 2], [7, 8, 9], [1, 7, 8], [5]]
    verified = dict(zip("abcd", rows, strict=True)) | {"d": []}  # vLLM had no room for d's
    came = {"a": [1, 4], "b": [7, 8, 4], "c": [1, 7, 8, 4], "d": [6]}
    told = drafter.learn(step(dict.fromkeys("abcd", 4), verified), sampled(came))
    assert [tuple(each) for each in told] == [("a", 2, 0, 0), ("b", 0, 3, 2), ("c", 1, 2, 2), ("d", 0, 0, 0)]


def test_no_more_of_its_tokens_are_looked_at_than_were_set() -> None:
    """Ngram and suffix drafters make what they find, whatever is set."""
    for tokens, seen in (0, []), (2, [7, 8]):
        drafter = ModelDrafter(Limits(16, tokens, False, False), COST)
        drafter.ask(step({"a": 1}, {}))
        assert drafter.choose(["a"], [None], [[7, 8, 9]], True) == [seen]


def test_a_drafter_that_rests_makes_nothing() -> None:
    drafter = ModelDrafter(Limits(16, 0), COST)
    now = step({"a": 9}, {}, new=["a"])
    drafter.ask(now)
    assert now.num_spec_tokens_to_schedule == REST
    assert drafter.asked is None


def test_what_rests_costs_the_requests_their_drafts() -> None:
    drafter = ModelDrafter(Limits(16, 3), COST)
    drafter._coverage.left_out({"a": True})
    drafter.ask(step({"a": 1}, {}))
    assert drafter.choose(["a"], [None], [[7]], True) == [[]]
    drafter.forget("a")
    assert drafter.choose(["a"], [None], [[7]], True) == [[7]]


def test_the_server_is_asked_for_more_where_its_drafts_are_compared() -> None:
    """Tokens that the model confirms pay beyond the length that the server would draft."""
    history = draft([1, 2, 3, 4, 5], [0.8] * 5)
    choice, rng = Choice(16), random.Random(0)
    for _ in range(800):  # where both agree, they are right
        rows, _ = choice.choose(["r"], [draft([1, 2, 3], [0.8] * 3)], [[1, 2, 3]], 0.1)
        wrong = rng.random() < 0.03
        choice.learn(["r"], [[9] if wrong else [*rows[0].tokens, 9]], {"r": rows[0]})
    confirmed = chosen(choice, history, [1, 2, 3], price=0.4)
    alone = chosen(choice, history, [], price=0.4)
    assert len(confirmed.tokens) == 5
    assert len(alone.tokens) < 5
    resting, drafting = ModelDrafter(Limits(16, 0), COST), ModelDrafter(Limits(16, 3), COST)
    assert resting.chooser.next() == COST
    assert drafting.chooser.next() == COST * LONGER


class Messages:
    """A client that keeps the reports of its messages."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def open(self, prompts: Sequence[Any], *_: Any) -> list[int]:
        """Returns a number per prompt."""
        return [7 for _ in prompts]

    def send(
        self, sessions: Any, tokens: Any, *_: Any, max_tokens: int = 0, verify_cost: float = 0, **report: Any
    ) -> None:
        """Keeps the report."""
        self.reports.append(report)


def test_a_drafter_that_rests_leaves_nothing_to_report() -> None:
    """The server takes its whole last draft as verified, which it was. Reports begin again with the model's drafts."""
    messages = Messages()
    sessions = RequestSessions(messages, 16)  # type: ignore[arg-type]
    sessions.begin("a", [1, 2], RequestOptions())
    drafter = ModelDrafter(Limits(16, 3), COST)
    for model in ([], [7, 8, 9], []):
        drafter.ask(step({"a": 1}, {}))
        (row,) = drafter.choose(["a"], [draft([1], [0.2])], [model], True)
        sessions.verified(drafter.learn(step({"a": 1 + len(row)}, {"a": row}), sampled({"a": [*row, 5]})))
        sessions.ask({"a": [*row, 5]}, 0.05)
    assert messages.reports == [{}, {"verified": [0], "model_drafted": [3], "model_accepted": [3]}, {}]
