"""Sessions that replay written responses the way an inference engine generates: each step takes the drafted tokens
that the response agrees with, and one more."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine.drafters import MAX_DRAFT, VERIFY_COST
from histospec.native import Engine
from histospec.replay.recordings import Tokens

Places = NDArray[np.int64]
TURN = 8  # steps that one engine takes in a row, before the turn of another


@dataclass(frozen=True)
class Step:
    """What one step took and gave.

    Attributes:
        wall: seconds that passed.
        cpu: seconds of the process, all its threads.
        tokens: the drafts, flat.

    """

    wall: float
    cpu: float
    tokens: Tokens


class Replay:
    """A batch of open sessions.

    Args:
        engine: where they run.
        live: (prompt, response) of each session, responses of one length.
        context: how many tokens of its response each has generated at the start.

    """

    def __init__(self, engine: Engine, live: list[tuple[Tokens, Tokens]], context: int, namespace: str = "bench"):
        self._engine = engine
        self._texts = np.stack([text for _, text in live])
        self._sessions = np.array([engine.open(namespace, prompt) for prompt, _ in live], np.int64)
        self._written = np.zeros(len(live), np.int64)
        self._next = np.full(len(live), context, np.int64)
        self.generated = 0
        self.step()  # catches up, and drafts for the first time
        self.generated = 0

    @property
    def done(self) -> bool:
        """Whether a session is so far that its next draft may reach beyond the response."""
        return bool((self._written + self._next).max() + MAX_DRAFT >= self._texts.shape[1])

    def step(self) -> Step:
        """One step of all sessions; only the call of the engine is timed."""
        offsets = np.concatenate([[0], np.cumsum(self._next)])
        new = self._texts[_ragged(self._written, self._next)]
        cpu, wall = time.process_time(), time.perf_counter()
        drafted, bounds, _ = self._engine.step(
            self._sessions, new, offsets, max_tokens=MAX_DRAFT, verify_cost=VERIFY_COST
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.generated += len(new)
        self._written += self._next
        drafts = np.diff(bounds)
        right = np.zeros((len(drafts), MAX_DRAFT + 1), bool)
        right[np.arange(MAX_DRAFT + 1) < drafts[:, None]] = drafted == self._texts[_ragged(self._written, drafts)]
        self._next = right.argmin(axis=1) + 1
        return Step(wall, cpu, drafted)

    def close(self) -> None:
        """Ends the sessions; what they generated is forgotten."""
        for session in self._sessions:
            self._engine.close(int(session), commit=False)


def _ragged(starts: Places, counts: Places) -> tuple[Places, Places]:
    """Rows and columns of counts[b] columns from starts[b] on, for every row b."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
