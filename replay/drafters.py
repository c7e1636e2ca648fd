"""What a replay asks of a drafter, and the engine as one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from histospec.native import Engine
from histospec.replay.recordings import Tokens

NAMESPACE = "replay"
ENGINE_BYTES = 8 << 30

# By source: `draft_tokens` that it spoke for, and how many of them were accepted, `accepted_tokens`.
Sources: TypeAlias = dict[str, dict[str, int]]


class Draft(NamedTuple):
    """A proposal: int32[k] tokens, and float32[k] the probability of each, given that all before it are accepted."""

    tokens: Tokens
    probs: npt.NDArray[np.float32]


class Drafter(Protocol):
    """One index with its sessions."""

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        """Add finished responses to a problem."""

    def open(self, prompt: Tokens) -> int:
        """Start a session and return its id. Open sessions of one prompt are siblings."""

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        """Append new[b] to session b, for all of them first; then draft for each, in the same order."""

    def close(self, session: int) -> None:
        """End a session; what it wrote is forgotten."""

    def sources(self) -> Sources:
        """What each source contributed so far; empty where the drafter does not say."""


class EngineDrafter(Drafter):
    """A new engine that weighs its drafts by `verify_cost` and makes them up to `max_tokens` long."""

    def __init__(self, verify_cost: float, max_tokens: int) -> None:
        self._engine = Engine(memory_bytes=ENGINE_BYTES)
        self._verify_cost = verify_cost
        self._max_tokens = max_tokens

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        """One call for all responses."""
        self._engine.ingest(NAMESPACE, prompt, responses, epoch=epoch)

    def open(self, prompt: Tokens) -> int:
        """One session."""
        return self._engine.open(NAMESPACE, prompt)

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        """One call for the whole batch."""
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
        """Without committing: a replay knows what was recorded before, not what it wrote itself."""
        self._engine.close(session, commit=False)

    def sources(self) -> Sources:
        """From the engine's counters, where it keeps them by source."""
        stats: Any = self._engine.stats()
        counted = stats["namespaces"].get(NAMESPACE, {}).get("sources", {})
        return {name: dict(counts) for name, counts in counted.items() if name != "model"}  # there is no model
