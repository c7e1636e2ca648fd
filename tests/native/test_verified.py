"""Reports of workers with a drafter of their own: their effect on counters, learning and drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from histospec.native import Engine

PROMPT = np.array([1, 2, 3], np.int32)
TEXT = np.arange(100, 160, dtype=np.int32)

Report = tuple[int, int, int]  # verified, model_drafted, model_accepted


class One:
    """An engine with one session, whose problem has a response."""

    def __init__(self) -> None:
        self.engine = Engine(1 << 28)
        self.engine.ingest("run", PROMPT, [TEXT, TEXT])
        self.session = self.engine.open("run", PROMPT)

    def step(
        self,
        new: "Sequence[int] | np.ndarray[Any, Any]",
        report: Report | None = None,
        max_tokens: int = 8,
        cost: float = 0.01,
    ) -> Any:
        said: dict[str, Any] = {}
        if report is not None:
            names = ("verified", "model_drafted", "model_accepted")
            said = {name: np.array([count], np.int32) for name, count in zip(names, report, strict=True)}
        return self.engine.step(
            np.array([self.session], np.int64), np.array(new, np.int32), np.array([0, len(new)], np.int64),
            max_tokens, cost, **said,
        )  # fmt: skip

    def counted(self) -> Any:
        return self.engine.stats()["namespaces"]["run"]


def test_what_was_not_verified_is_not_counted() -> None:
    one = One()
    (draft, *_) = one.step(TEXT[:4], (0, 0, 0))
    assert len(draft) == 8
    assert one.counted()["draft_tokens"] == 0  # so far
    one.step(TEXT[4:8], (0, 3, 3))  # the model's draft, which says the same
    one.step(TEXT[8:11], (2, 0, 0))  # two tokens of ours, and the bonus, which is the third
    one.step([TEXT[11], 900], (8, 0, 0))  # all, and one is right
    counted = one.counted()
    assert (counted["draft_tokens"], counted["accepted_tokens"]) == (10, 3)
    assert counted["sources"]["history"] == {"draft_tokens": 10, "accepted_tokens": 3}
    assert counted["sources"]["model"] == {"draft_tokens": 3, "accepted_tokens": 3}
    # One step with the prompt, and three that took four tokens together; then three with drafts that were asked for.
    assert (counted["undrafted_tokens"], counted["drafts_hit"] + counted["drafts_empty"]) == (3, 4)


def test_steps_that_nobody_asked_a_draft_for_are_counted_as_steps() -> None:
    """Ten tokens of the model in five steps, four of which the server did not hear of."""
    one = One()
    one.step(TEXT[:1], (0, 0, 0))
    one.step(TEXT[1:11], (0, 15, 5))
    assert one.counted()["undrafted_tokens"] == 4


def test_what_nobody_reports_counts_as_before() -> None:
    """A worker starts, or stops, reporting."""
    one = One()
    (first, *_) = one.step(TEXT[:4])
    assert one.counted()["draft_tokens"] == len(first)
    one.step(TEXT[4:7], (0, 2, 2))
    assert (one.counted()["draft_tokens"], one.counted()["accepted_tokens"]) == (len(first), 0)
    one.step(TEXT[7:9])  # its draft was made for a worker that reports, and now it counts as verified in full
    last = 8
    assert one.counted()["draft_tokens"] >= len(first) + 2 + last
    assert one.counted()["accepted_tokens"] == 2


def test_a_row_without_new_tokens_reports_nothing() -> None:
    one = One()
    one.step(TEXT[:4], (0, 0, 0))
    one.step([], (8, 5, 5))
    counted = one.counted()
    assert (counted["draft_tokens"], counted["sources"]["model"]["draft_tokens"]) == (0, 0)


def test_counts_beyond_what_there_is_are_cut() -> None:
    """A session that was opened anew has no draft; a response that was cut has fewer tokens than were accepted."""
    one = One()
    one.step(TEXT[:2], (16, 0, 0))
    one.step(TEXT[2:4], (0, 7, 7))
    counted = one.counted()
    assert (counted["draft_tokens"], counted["accepted_tokens"]) == (0, 0)
    assert counted["sources"]["model"] == {"draft_tokens": 7, "accepted_tokens": 2}
    assert counted["generated_tokens"] == 4


def test_whoever_drafts_the_same_tokens_teach_the_same() -> None:
    """The estimator learns from all generated tokens; only the yield of steps depends on the report."""
    ours, theirs = One(), One()
    probs = {}
    for one, said in ((ours, None), (theirs, (0, 4, 4))):
        one.step(TEXT[:1], said and (0, 0, 0))
        for start in range(1, 41, 5):
            one.step(TEXT[start : start + 5], said)
        probs[said] = one.step(TEXT[41:44], said, cost=0.0)[2]
    (first, second) = probs.values()
    np.testing.assert_array_equal(first, second)
    assert ours.engine.estimator_state("run") != Engine().estimator_state("run") == b""


def test_a_draft_competes_with_what_the_other_drafter_yields() -> None:
    """If the model's drafts give three tokens per step, an unlikely token does not pay for its verification."""
    lengths = {}
    for accepted in (0, 3):
        engine = Engine(1 << 28)
        doubtful = [[5, 6, 7, *([n] * 5)] for n in range(100, 103)]
        engine.ingest("run", PROMPT, [np.array(text, np.int32) for text in doubtful])
        busy, session = engine.open("run", PROMPT[:1]), engine.open("run", PROMPT)
        for _ in range(3000):
            new = np.arange(accepted + 1, dtype=np.int32)
            engine.step(
                np.array([busy], np.int64), new, np.array([0, len(new)], np.int64), 0, 0.0,
                verified=np.zeros(1, np.int32), model_drafted=np.full(1, 3, np.int32),
                model_accepted=np.full(1, accepted, np.int32),
            )  # fmt: skip
        one = np.array([session], np.int64), np.array([5, 6, 7], np.int32), np.array([0, 3], np.int64)
        _, _, probs = engine.step(*one, 16, 0.0)
        least = probs.cumprod()[0] / 2.5  # a cost at which a speed-up of 1 pays for this token, and one of 3 does not
        engine.close(session, commit=False)
        session = engine.open("run", PROMPT)
        tokens, _, _ = engine.step(np.array([session], np.int64), *one[1:], 16, float(least))
        lengths[accepted] = len(tokens)
    assert lengths[0] > lengths[3] == 0


def test_no_report_spoils_what_was_learned() -> None:
    """However large its numbers are: the state can be restored."""
    one = One()
    one.step(TEXT[:2], (0, 0, 0))
    most = 2**31 - 1
    for _ in range(3):
        one.step([*TEXT[2:40]] * 1000, (1024, most, most))
    state = one.engine.estimator_state("run")
    assert state
    Engine().restore_estimator("run", state)
    assert one.counted()["sources"]["model"]["draft_tokens"] == 3 * most
    assert one.counted()["undrafted_tokens"] <= one.counted()["generated_tokens"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"verified": [0, 0]}, r"verified: has 2 entries, must have 1 \(one per session\)"),
        ({"verified": [-1]}, r"verified\[0\]: is -1, must lie in \[0, 1024\]"),
        ({"verified": [1025]}, r"verified\[0\]: is 1025, must lie in \[0, 1024\]"),
        ({"model_drafted": [1], "model_accepted": [1]}, r"verified: has 0 entries"),
        ({"verified": [0], "model_drafted": [1]}, r"model_accepted: has 0 entries"),
        ({"verified": [0], "model_drafted": [-1], "model_accepted": [0]}, r"model_drafted\[0\]: is -1"),
        ({"verified": [0], "model_drafted": [1], "model_accepted": [2]}, r"model_accepted\[0\]: is 2, more than"),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_is_refused(said: dict[str, list[int]], message: str) -> None:
    one = One()
    before = one.counted()
    rest: Any = {name: np.array(counts, np.int32) for name, counts in said.items()}
    with pytest.raises(ValueError, match=message):
        one.engine.step(
            np.array([one.session], np.int64), TEXT[:1], np.array([0, 1], np.int64), 4, 0.1, **rest
        )  # fmt: skip
    assert one.counted() == before


def test_a_report_has_its_dtype() -> None:
    one = One()
    wrong: Any = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="verified: has dtype int64, must be int32"):
        one.engine.step(np.array([one.session], np.int64), TEXT[:1], np.array([0, 1], np.int64), verified=wrong)


def test_each_step_is_priced_at_its_own_cost() -> None:
    """A later cost, such as that of a full GPU, does not change what earlier steps have cost."""
    one = One()
    (draft, *_) = one.step(TEXT[:4], cost=0.02)
    assert one.counted()["verify_microsteps"] == 20_000 * len(draft)
    one.step(TEXT[4:8], max_tokens=0, cost=0.9)  # asks for nothing, so it verifies nothing
    assert one.counted()["verify_microsteps"] == 20_000 * len(draft)
    reported = One()
    reported.step(TEXT[:4], (0, 0, 0), cost=0.02)
    assert reported.counted()["verify_microsteps"] == 0  # so far
    reported.step(TEXT[4:8], (2, 3, 1), cost=0.1)  # two of the server's tokens, three of the model's
    assert reported.counted()["verify_microsteps"] == 500_000


def test_no_report_makes_the_sum_overflow() -> None:
    one = One()
    most = np.iinfo(np.int32).max
    for number in range(10):
        one.step([int(TEXT[number])], (0, most, 0), max_tokens=0, cost=3e38)
    assert one.counted()["verify_microsteps"] == 10 * 16_000_000 * (1 << 16)
