"""Recorded responses replayed through the engine: what would drafts from their history have gained?

The rules. One response of a visit is the target: the first. The engine knows what came before it and drafts; a step
verifies one draft and yields the part of it that the target confirms plus the target's next token. What the
environment wrote is context: pushed along with the next step, never drafted, never counted.

The score at verification cost c is S_c = tokens / sum over steps (1 + c * drafted tokens): the speed-up over plain
decoding when verifying one drafted token costs c of a decoding step. Every pass has an engine of its own, so no pass
profits from another's targets; within a pass the engine learns from one target for the next, as in a run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from histospec.native import Engine
from histospec.server.recordings import Problem, RecordedResponse, Tokens, Turn

NAMESPACE = "replay"
ENGINE_BYTES = 8 << 30
RESAMPLES = 1000


@dataclass(frozen=True)
class Case:
    """One problem as the engine will meet it: what it may know, and the target it is asked about."""

    prompt: Tokens
    history: tuple[RecordedResponse, ...]
    target: tuple[Turn, ...]

    def history_tokens(self) -> int:
        """Tokens that the engine knows before the target begins, the prompt not counted."""
        return sum(len(turn.tokens) for response in self.history for turn in response.turns)

    def target_tokens(self) -> int:
        """Tokens of the target that the model generated."""
        return sum(len(turn.tokens) for turn in self.target if turn.generated)


def case_at(problem: Problem, epoch: int, *, siblings: bool, max_response: int) -> Case | None:
    """The problem at one of its visits, or None where there is nothing to know or nothing to ask about.

    Args:
        problem: the recorded problem.
        epoch: a visit of the problem; its first response becomes the target.
        siblings: whether the engine also knows the visit's other responses, as if they had just been finished.
        max_response: the target is cut to this many tokens.

    """
    visit = [response for response in problem.responses if response.epoch == epoch]
    known = [response for response in problem.responses if response.epoch < epoch]
    if siblings:
        known += visit[1:]
    if not visit or not known:
        return None
    return Case(problem.prompt, tuple(known), visit[0].cut(max_response))


@dataclass(frozen=True)
class Score:
    """What one pass over the cases gave with the engine told that a drafted token costs `verify_cost` steps.

    Attributes:
        verify_cost: the cost that the engine weighed its drafts by.
        counts: int64[cases, 3], a case's steps, drafted tokens and generated tokens.

    """

    verify_cost: float
    counts: npt.NDArray[np.int64]

    @property
    def steps(self) -> int:
        """Verification steps of all cases."""
        return int(self.counts[:, 0].sum())

    @property
    def drafted(self) -> int:
        """Drafted tokens of all cases, accepted or not."""
        return int(self.counts[:, 1].sum())

    @property
    def tokens(self) -> int:
        """Generated tokens of all cases."""
        return int(self.counts[:, 2].sum())

    @property
    def accepted(self) -> int:
        """Drafted tokens that the targets confirmed; every step gives one more token that was not drafted."""
        return self.tokens - self.steps

    def speed_up(self, cost: float | None = None) -> float:
        """S_c at the pass's own cost, or at another."""
        return self.tokens / (self.steps + (self.verify_cost if cost is None else cost) * self.drafted)

    def speed_ups(self) -> npt.NDArray[np.float64]:
        """float64[cases with a step]: S_c of every case alone, at the pass's own cost."""
        steps, drafted, tokens = self.counts[self.counts[:, 0] > 0].T
        return np.asarray(tokens / (steps + self.verify_cost * drafted))

    def interval(self) -> tuple[float, float]:
        """Where S_c lies in 95 % of bootstrap samples of the cases: how far it depends on which problems were taken."""
        picks = np.random.default_rng(0).integers(len(self.counts), size=(RESAMPLES, len(self.counts)))
        steps, drafted, tokens = self.counts[picks].sum(axis=1).T
        low, high = np.quantile(tokens / np.maximum(steps + self.verify_cost * drafted, 1), (0.025, 0.975))
        return float(low), float(high)


def score(cases: Sequence[Case], verify_cost: float, max_tokens: int, done: Callable[[], None]) -> Score:
    """Replay all cases through one new engine; `done()` is called after each of them."""
    engine = Engine(memory_bytes=ENGINE_BYTES)
    for case in cases:
        for epoch, visit in groupby(sorted(case.history, key=_epoch), key=_epoch):
            engine.ingest(NAMESPACE, case.prompt, [response.flat() for response in visit], epoch=epoch)
    counts = []
    for case in cases:
        counts.append(_follow(engine, case, verify_cost, max_tokens))
        done()
    return Score(verify_cost, np.array(counts, np.int64).reshape(-1, 3))


def _epoch(response: RecordedResponse) -> int:
    return response.epoch


def _follow(engine: Engine, case: Case, verify_cost: float, max_tokens: int) -> tuple[int, int, int]:
    """Generate the target as a worker would, step by step. Returns steps, drafted tokens, generated tokens."""
    session = engine.open(NAMESPACE, case.prompt)
    ids = np.array([session], np.int64)
    unseen: list[Tokens] = []  # what the session emitted since its last step
    steps = drafted = 0
    for turn in case.target:
        if not turn.generated:
            unseen.append(turn.tokens)
            continue
        at = 0
        while at < len(turn.tokens):
            new = _joined(unseen)
            draft, _, _ = engine.step(
                ids, new, np.array([0, len(new)], np.int64), max_tokens=max_tokens, verify_cost=verify_cost
            )
            end = at + _confirmed(draft, turn.tokens[at:-1]) + 1
            unseen = [turn.tokens[at:end]]
            at = end
            steps += 1
            drafted += len(draft)
    engine.close(session, commit=False)
    return steps, drafted, case.target_tokens()


def _confirmed(draft: Tokens, text: Tokens) -> int:
    """How many tokens of the draft the text begins with."""
    length = min(len(draft), len(text))
    misses = np.flatnonzero(draft[:length] != text[:length])
    return int(misses[0]) if len(misses) else length


def _joined(parts: Iterable[Tokens]) -> Tokens:
    return np.concatenate([np.empty(0, np.int32), *parts])
