"""Sessions that replay given responses the way an inference engine generates.

Each step appends the drafted tokens that agree with the response, and one more.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine.drafters import MAX_DRAFT, VERIFY_COST
from histospec.native import Engine
from histospec.replay.recordings import Tokens

Places = NDArray[np.int64]
TURN = 8  # how many steps one engine makes before the turn of another


@dataclass(frozen=True)
class Step:
    """The times and drafts of one step.

    Attributes:
        wall: duration in seconds.
        cpu: CPU seconds of all threads of the process.
        tokens: the drafts, flat.

    """

    wall: float
    cpu: float
    tokens: Tokens


class Replay:
    """A batch of open sessions.

    Args:
        engine: the engine.
        live: (prompt, response) of each session; all responses have the same length.
        context: how many tokens of its response each session has generated at the start.

    """

    def __init__(self, engine: Engine, live: list[tuple[Tokens, Tokens]], context: int, namespace: str = "bench"):
        self._engine = engine
        self._texts = np.stack([text for _, text in live])
        self._sessions = np.array([engine.open(namespace, prompt) for prompt, _ in live], np.int64)
        self._written = np.zeros(len(live), np.int64)
        self._next = np.full(len(live), context, np.int64)
        self.generated = 0
        self.step()  # the first step also catches up with the context
        self.generated = 0

    @property
    def done(self) -> bool:
        """Returns whether the next draft of a session may reach beyond its response."""
        return bool((self._written + self._next).max() + MAX_DRAFT >= self._texts.shape[1])

    def step(self) -> Step:
        """Steps all sessions; times only the call of the engine."""
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
        """Ends the sessions without committing their tokens."""
        for session in self._sessions:
            self._engine.close(int(session), commit=False)


def _ragged(starts: Places, counts: Places) -> tuple[Places, Places]:
    """Returns the rows and columns of counts[b] columns from starts[b] on, for every row b."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
