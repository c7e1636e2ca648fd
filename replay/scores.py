"""Replays recorded responses through a drafter, and scores its drafts.

A step verifies one draft: it yields the part that the recorded text confirms, plus the text's next token. Text from the
environment is context: it is appended with the next step, never drafted and never counted.

The score at verification cost c is S_c = tokens / sum over steps (1 + c * drafted tokens): the speed-up over decoding
without drafts if verifying one draft token costs c of a decoding step. Every pass has its own drafter, so no pass
profits from another's targets. Within a pass, the engine learns from one target for the next, as in a run.

Every verified draft token is one observation of the calibration. A token is verified if all tokens before it in its
draft were accepted: the accepted tokens and the first rejected one. Tokens beyond the recorded text are not verified.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from histospec.replay.drafters import Draft, Drafter, EngineDrafter
from histospec.replay.recordings import RecordedResponse, Tokens, Turn, common

RESAMPLES = 1000
NOTHING = np.empty(0, np.int32)
Turns = tuple[Turn, ...]


@dataclass(frozen=True)
class Case:
    """One problem for the drafter: what it may know, and the target to draft for.

    Attributes:
        prompt: int32[n].
        history: responses finished before.
        target: the response to replay and score.
        siblings: responses to replay at the same time.

    """

    prompt: Tokens
    history: tuple[RecordedResponse, ...]
    target: Turns
    siblings: tuple[Turns, ...] = ()

    def history_tokens(self) -> int:
        """The tokens that the drafter knows before the target begins, without the prompt."""
        return sum(len(turn.tokens) for response in self.history for turn in response.turns)

    def target_tokens(self) -> int:
        """The tokens of the target that the model generated."""
        return generated_tokens(self.target)


def generated_tokens(turns: Iterable[Turn]) -> int:
    """Returns the number of tokens of the turns that the model generated."""
    return sum(len(turn.tokens) for turn in turns if turn.generated)


@dataclass(frozen=True)
class Verified:
    """Observations: float32[n] predicted probabilities of acceptance, bool[n] whether each token was accepted."""

    predicted: npt.NDArray[np.float32]
    accepted: npt.NDArray[np.bool_]

    @staticmethod
    def none() -> "Verified":
        """Returns no observations."""
        return Verified(np.empty(0, np.float32), np.empty(0, np.bool_))

    @staticmethod
    def joined(parts: Iterable["Verified"]) -> "Verified":
        """Returns the observations of all parts."""
        parts = [Verified.none(), *parts]
        return Verified(np.concatenate([p.predicted for p in parts]), np.concatenate([p.accepted for p in parts]))


@dataclass(frozen=True)
class Decile:
    """The observations with a predicted probability in [low, high).

    Attributes:
        low, high: the bounds, a tenth apart; the last decile includes 1.
        tokens: number of observations, at least 1.
        predicted: their mean predicted probability.
        observed: the share that was accepted.

    """

    low: float
    high: float
    tokens: int
    predicted: float
    observed: float

    def margin(self) -> float:
        """Half a 95 % interval of `observed` from chance alone (Wilson's, wider side)."""
        z, n = 1.96, self.tokens
        spread = z * np.sqrt(self.observed * (1 - self.observed) / n + (z / (2 * n)) ** 2)
        return float((spread + abs(0.5 - self.observed) * z * z / n) / (1 + z * z / n))


def deciles(verified: Verified) -> list[Decile]:
    """Returns the deciles that have observations, lowest first."""
    places = np.minimum((verified.predicted * 10).astype(np.int64), 9)
    counts = np.bincount(places, minlength=10)
    predicted = np.bincount(places, weights=verified.predicted, minlength=10)
    accepted = np.bincount(places, weights=verified.accepted, minlength=10)
    return [
        Decile(i / 10, (i + 1) / 10, int(n), float(predicted[i] / n), float(accepted[i] / n))
        for i, n in enumerate(counts)
        if n
    ]


@dataclass(frozen=True)
class Score:
    """The result of one pass over the cases, with a drafter that drafts at `verify_cost`.

    Attributes:
        verify_cost: the cost given to the drafter.
        counts: int64[cases, 3], steps, draft tokens and generated tokens of each target.
        siblings: int64[cases, 3], the same, summed over the siblings of each target.
        verified: every verified draft token of targets and siblings.
        sources: contribution of each source, if the drafter reports it.

    """

    verify_cost: float
    counts: npt.NDArray[np.int64]
    siblings: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    verified: Verified = field(default_factory=Verified.none)
    sources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The steps of all targets."""
        return int(self.counts[:, 0].sum())

    @property
    def drafted(self) -> int:
        """The draft tokens of all targets."""
        return int(self.counts[:, 1].sum())

    @property
    def tokens(self) -> int:
        """The generated tokens of all targets."""
        return int(self.counts[:, 2].sum())

    @property
    def accepted(self) -> int:
        """The accepted draft tokens of all targets; every step also yields one token that was not drafted."""
        return self.tokens - self.steps

    def tokens_a_step(self) -> float:
        """Returns generated tokens / steps of all targets."""
        return self.tokens / self.steps

    def drafted_a_step(self) -> float:
        """Returns draft tokens / steps of all targets."""
        return self.drafted / self.steps

    def group_tokens_a_step(self) -> float:
        """Returns generated tokens / steps of all targets and their siblings."""
        steps, _, tokens = self.counts.sum(axis=0) + self.siblings.sum(axis=0)
        return float(tokens / steps)

    def speed_up(self, cost: float | None = None) -> float:
        """Returns S_c at the pass's own cost, or at another one."""
        return self.tokens / (self.steps + (self.verify_cost if cost is None else cost) * self.drafted)

    def speed_ups(self) -> npt.NDArray[np.float64]:
        """Returns float64[cases with a step]: S_c of each target, at the pass's own cost."""
        steps, drafted, tokens = self.counts[self.counts[:, 0] > 0].T
        return np.asarray(tokens / (steps + self.verify_cost * drafted))

    def interval(self) -> tuple[float, float]:
        """Returns the 95 % bootstrap interval of S_c over the cases: how much it depends on the drawn problems."""
        picks = np.random.default_rng(0).integers(len(self.counts), size=(RESAMPLES, len(self.counts)))
        steps, drafted, tokens = self.counts[picks].sum(axis=1).T
        low, high = np.quantile(tokens / np.maximum(steps + self.verify_cost * drafted, 1), (0.025, 0.975))
        return float(low), float(high)


def score(cases: Sequence[Case], verify_cost: float, max_tokens: int, done: Callable[[Case], None]) -> Score:
    """Replays all cases through one new engine. Calls `done(case)` after each of them."""
    drafter = EngineDrafter(verify_cost, max_tokens)
    teach(drafter, cases)
    return follow(drafter, cases, verify_cost, done)


def teach(drafter: Drafter, cases: Sequence[Case]) -> None:
    """Gives the drafter the history of every case, oldest epoch first."""
    for case in cases:
        for epoch, visit in groupby(sorted(case.history, key=_epoch), key=_epoch):
            drafter.ingest(case.prompt, [response.flat() for response in visit], epoch)


def _epoch(response: RecordedResponse) -> int:
    return response.epoch


def follow(drafter: Drafter, cases: Sequence[Case], verify_cost: float, done: Callable[[Case], None]) -> Score:
    """Replays the targets one after another. The siblings of a case run in step with its target.

    A step is one call for all sessions of the case that have text left, so the next step knows what each session wrote.
    A session that has ended stays open, and its text known, until its group ends.
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
        self._unseen: list[Tokens] = []  # written since the last step
        self._text = NOTHING  # the rest of the turn
        self._next_turn()

    def _next_turn(self) -> None:
        """Goes to the model's next turn. Turns of the environment before it need no step."""
        for turn in self._turns:
            if turn.generated:
                self._text = turn.tokens
                return
            self._unseen.append(turn.tokens)

    @property
    def ended(self) -> bool:
        """Whether the whole response is written."""
        return not len(self._text)

    def unseen(self) -> Tokens:
        """Returns what was written since the last call, int32[n]."""
        new: Tokens = np.concatenate([NOTHING, *self._unseen])
        self._unseen.clear()
        return new

    def verify(self, draft: Draft) -> None:
        """Takes one step: writes the correct part of the draft and one more token."""
        right = common(draft.tokens, self._text)
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
        """Returns steps, draft tokens and generated tokens."""
        return self._steps, self._drafted, self._tokens


def _sum(writers: Sequence[_Writer]) -> npt.NDArray[np.int64]:
    return np.asarray(np.array([writer.counts() for writer in writers], np.int64).reshape(-1, 3).sum(axis=0))
