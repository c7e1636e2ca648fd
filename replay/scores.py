"""Recorded responses replayed through a drafter: what would its drafts have gained?

A step verifies one draft and yields the part of it that the recorded text confirms, plus the text's next token. What
the environment wrote is context: pushed along with the next step, never drafted, never counted.

The score at verification cost c is S_c = tokens / sum over steps (1 + c * drafted tokens): the speed-up over plain
decoding when verifying one drafted token costs c of a decoding step. Every pass has a drafter of its own, so no pass
profits from another's targets; within a pass the engine learns from one target for the next, as in a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from histospec.replay.calibration import Verified
from histospec.replay.cases import Case, Turns, generated_tokens
from histospec.replay.drafters import Draft, Drafter, EngineDrafter
from histospec.replay.recordings import RecordedResponse, Tokens

RESAMPLES = 1000
NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class Score:
    """What one pass over the cases gave with the drafter told that a drafted token costs `verify_cost` steps.

    Attributes:
        verify_cost: the cost that the drafter weighed its drafts by.
        counts: int64[cases, 3], the steps, drafted tokens and generated tokens of a case's target.
        siblings: int64[cases, 3], the same, summed over the siblings that ran beside it.
        verified: every drafted token that was verified, of targets and siblings.
        sources: what each source contributed, where the drafter says so.

    """

    verify_cost: float
    counts: npt.NDArray[np.int64]
    siblings: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    verified: Verified = field(default_factory=Verified.none)
    sources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of all targets."""
        return int(self.counts[:, 0].sum())

    @property
    def drafted(self) -> int:
        """Drafted tokens for all targets."""
        return int(self.counts[:, 1].sum())

    @property
    def tokens(self) -> int:
        """Generated tokens of all targets."""
        return int(self.counts[:, 2].sum())

    @property
    def accepted(self) -> int:
        """Drafted tokens that the targets confirmed; every step gives one more token that was not drafted."""
        return self.tokens - self.steps

    def tokens_a_step(self) -> float:
        """Generated tokens of all targets / their steps."""
        return self.tokens / self.steps

    def group_tokens_a_step(self) -> float:
        """Generated tokens of all targets and their siblings / their steps."""
        steps, _, tokens = self.counts.sum(axis=0) + self.siblings.sum(axis=0)
        return float(tokens / steps)

    def speed_up(self, cost: float | None = None) -> float:
        """S_c at the pass's own cost, or at another."""
        return self.tokens / (self.steps + (self.verify_cost if cost is None else cost) * self.drafted)

    def speed_ups(self) -> npt.NDArray[np.float64]:
        """float64[cases with a step]: S_c of every target alone, at the pass's own cost."""
        steps, drafted, tokens = self.counts[self.counts[:, 0] > 0].T
        return np.asarray(tokens / (steps + self.verify_cost * drafted))

    def interval(self) -> tuple[float, float]:
        """Where S_c lies in 95 % of bootstrap samples of the cases: how far it depends on which problems were taken."""
        picks = np.random.default_rng(0).integers(len(self.counts), size=(RESAMPLES, len(self.counts)))
        steps, drafted, tokens = self.counts[picks].sum(axis=1).T
        low, high = np.quantile(tokens / np.maximum(steps + self.verify_cost * drafted, 1), (0.025, 0.975))
        return float(low), float(high)


def score(cases: Sequence[Case], verify_cost: float, max_tokens: int, done: Callable[[Case], None]) -> Score:
    """Replay all cases through one new engine; `done(case)` is called after each of them."""
    drafter = EngineDrafter(verify_cost, max_tokens)
    teach(drafter, cases)
    return follow(drafter, cases, verify_cost, done)


def teach(drafter: Drafter, cases: Sequence[Case]) -> None:
    """Show the drafter the history of every case, oldest epoch first."""
    for case in cases:
        for epoch, visit in groupby(sorted(case.history, key=_epoch), key=_epoch):
            drafter.ingest(case.prompt, [response.flat() for response in visit], epoch)


def _epoch(response: RecordedResponse) -> int:
    return response.epoch


def follow(drafter: Drafter, cases: Sequence[Case], verify_cost: float, done: Callable[[Case], None]) -> Score:
    """Write the targets again, one case after another; the siblings of a case run in step with its target.

    A step is one call for all sessions of the case that have text left, so that what a session wrote in one step is
    known to its siblings in the next. A session that has ended stays open, and its text known, until its group ends.
    """
    writers: list[list[_Writer]] = []
    for case in cases:
        sessions = [_Writer(drafter.open(case.prompt), turns) for turns in (case.target, *case.siblings)]
        while running := [writer for writer in sessions if not writer.ended]:
            drafts = drafter.step([writer.session for writer in running], [writer.unseen() for writer in running])
            for writer, draft in zip(running, drafts, strict=True):
                writer.verify(draft)
        for writer in sessions:
            drafter.close(writer.session)
        writers.append(sessions)
        done(case)
    return Score(
        verify_cost,
        np.array([sessions[0].counts() for sessions in writers], np.int64).reshape(-1, 3),
        np.array([_sum(sessions[1:]) for sessions in writers], np.int64).reshape(-1, 3),
        Verified.joined(part for sessions in writers for writer in sessions for part in writer.verified),
        drafter.sources(),
    )


class _Writer:
    """A session that writes its recorded response again, as the model would under exact verification."""

    def __init__(self, session: int, turns: Turns) -> None:
        self.session = session
        self.verified: list[Verified] = []
        self._tokens = generated_tokens(turns)
        self._steps = self._drafted = 0
        self._turns = iter(turns)
        self._unseen: list[Tokens] = []  # what was written since the last step
        self._text = NOTHING  # what is left of the turn
        self._next_turn()

    def _next_turn(self) -> None:
        """The next turn of the model; what the environment says before it needs no step."""
        for turn in self._turns:
            if turn.generated:
                self._text = turn.tokens
                return
            self._unseen.append(turn.tokens)

    @property
    def ended(self) -> bool:
        """Whether all of the response is written."""
        return not len(self._text)

    def unseen(self) -> Tokens:
        """What was written since the last call, int32[n]."""
        new: Tokens = np.concatenate([NOTHING, *self._unseen])
        self._unseen.clear()
        return new

    def verify(self, draft: Draft) -> None:
        """Take one step: write what the draft has right, and one token more."""
        right = _matching(draft.tokens, self._text)
        asked = min(right + 1, len(draft.tokens), len(self._text))
        self.verified.append(Verified(draft.probs[:asked], np.arange(asked) < right))
        written = min(right + 1, len(self._text))
        self._unseen.append(self._text[:written])
        self._text = self._text[written:]
        self._steps += 1
        self._drafted += len(draft.tokens)
        if not len(self._text):
            self._next_turn()

    def counts(self) -> tuple[int, int, int]:
        """Steps, drafted tokens and generated tokens."""
        return self._steps, self._drafted, self._tokens


def _sum(writers: Sequence[_Writer]) -> npt.NDArray[np.int64]:
    return np.asarray(np.array([writer.counts() for writer in writers], np.int64).reshape(-1, 3).sum(axis=0))


def _matching(draft: Tokens, text: Tokens) -> int:
    """How many tokens of the draft the text begins with."""
    length = min(len(draft), len(text))
    misses = np.flatnonzero(draft[:length] != text[:length])
    return int(misses[0]) if len(misses) else length
