"""The interface of a drafter for replays, and the engine behind it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from histospec.native import Engine
from histospec.replay.recordings import Tokens

NAMESPACE = "replay"
ENGINE_BYTES = 8 << 30

# By source: its `draft_tokens`, and how many of them were accepted, `accepted_tokens`.
Sources: TypeAlias = dict[str, dict[str, int]]


class Draft(NamedTuple):
    """A draft: int32[k] tokens, and float32[k] the probability of each if all tokens before it are accepted."""

    tokens: Tokens
    probs: npt.NDArray[np.float32]


class Drafter(Protocol):
    """One index with its sessions."""

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        """Adds finished responses to a problem."""

    def open(self, prompt: Tokens) -> int:
        """Starts a session and returns its id. Open sessions with the same prompt are siblings."""

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        """Appends new[b] to session b, first for all sessions; then drafts for each, in the same order."""

    def close(self, session: int) -> None:
        """Ends a session and forgets what it wrote."""

    def sources(self) -> Sources:
        """Returns what each source contributed so far; empty if the drafter does not report it."""


class EngineDrafter(Drafter):
    """A new engine that drafts at `verify_cost`, up to `max_tokens` tokens."""

    def __init__(self, verify_cost: float, max_tokens: int) -> None:
        self._engine = Engine(memory_bytes=ENGINE_BYTES)
        self._verify_cost = verify_cost
        self._max_tokens = max_tokens

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        """Adds all responses in one call."""
        self._engine.ingest(NAMESPACE, prompt, responses, epoch=epoch)

    def open(self, prompt: Tokens) -> int:
        """Opens one session."""
        return self._engine.open(NAMESPACE, prompt)

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        """Steps the whole batch in one call."""
        tokens, offsets, probs = self._engine.step(
            np.array(sessions, np.int64),
            np.concatenate(new),
            np.cumsum([0, *map(len, new)], dtype=np.int64),
            max_tokens=self._max_tokens,
            verify_cost=self._verify_cost,
        )
        ends = offsets.tolist()
        return [Draft(tokens[a:b], probs[a:b]) for a, b in pairwise(ends)]

    def close(self, session: int) -> None:
        """Closes without a commit: the drafter knows the recorded history, not what a replay writes."""
        self._engine.close(session, commit=False)

    def sources(self) -> Sources:
        """Returns the engine's counters by source, if it has them."""
        stats: Any = self._engine.stats()
        counted = stats["namespaces"].get(NAMESPACE, {}).get("sources", {})
        return {name: dict(counts) for name, counts in counted.items() if name != "model"}  # a replay has no model
