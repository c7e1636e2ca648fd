"""Arctic's suffix decoding, where it is installed, on the cases of a replay: a second opinion on the same text.

It has no notion of what a drafted token costs, so it is replayed with each setting of a grid and then judged, at every
cost, by the setting that was best at that cost: better than any user gets, who must pick one before the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from histospec.replay.cases import Case
from histospec.replay.drafters import Draft, Drafter, Sources
from histospec.replay.recordings import Tokens
from histospec.replay.scores import Score, follow, teach
from histospec.server.errors import ConfigError

PACKAGE = "arctic-inference"
MODULE = "arctic_inference.suffix_decoding"
MATCHED = 64  # tokens of context that are looked up


class Settings(NamedTuple):
    """Arctic's two knobs: tokens less probable are not drafted; a draft is at most factor * match long."""

    min_token_prob: float
    max_spec_factor: float


GRID = tuple(Settings(*values) for values in product((0.1, 0.2, 0.35, 0.5), (1.0, 2.0)))


@dataclass(frozen=True)
class Peer:
    """Another drafter on the headline's cases: its name with version, and one score a setting."""

    name: str
    scores: dict[Settings, Score]

    def best(self, cost: float) -> tuple[Settings, Score]:
        """The setting with the highest S_c at this cost."""
        return max(self.scores.items(), key=lambda item: item[1].speed_up(cost))


def require() -> None:
    """Check that the peer can run here.

    Raises:
        ConfigError: the package is not installed; says how to get it.

    """
    try:
        import_module(MODULE)
    except ImportError:
        raise ConfigError(
            f"--compare arctic: the package {PACKAGE} is not installed; "
            f"`pip install --no-deps {PACKAGE}==0.1.1` is enough for its drafter"
        ) from None


def replay(cases: Sequence[Case], max_tokens: int, done: Callable[[Case], None]) -> Peer:
    """Replay the cases with each setting of the grid.

    Each has an index of its own: evicting a target leaves traces that would help the next setting (measured: 2 %).
    """
    scores = {}
    for settings in GRID:
        drafter = ArcticDrafter(max_tokens, settings)
        teach(drafter, cases)
        scores[settings] = follow(drafter, cases, 0.0, done)
    return Peer(f"Arctic {metadata.version(PACKAGE)}", scores)


class ArcticDrafter(Drafter):
    """Snowflake's suffix decoding with the calls of vLLM's own proposer: two a session and step."""

    def __init__(self, max_tokens: int, settings: Settings) -> None:
        self._cache: Any = import_module(MODULE).SuffixDecodingCache(max_tree_depth=MATCHED)
        self._max_tokens = max_tokens
        self._requests = 0
        self._contexts: dict[int, Tokens] = {}  # of each session, the last tokens
        self._settings = settings

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        """Each response is a request that starts, grows and stops."""
        for response in responses:
            request = self._start(prompt)
            self._cache.add_active_response(request, response)
            self._cache.stop_request(request)

    def open(self, prompt: Tokens) -> int:
        """One request."""
        session = self._start(prompt)
        self._contexts[session] = prompt[-MATCHED:]
        return session

    def _start(self, prompt: Tokens) -> int:
        self._requests += 1
        self._cache.start_request(self._requests, prompt)
        return self._requests

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        """Append for all, then speculate for each."""
        for session, tokens in zip(sessions, new, strict=True):
            if len(tokens):
                self._cache.add_active_response(session, tokens)
                self._contexts[session] = np.concatenate([self._contexts[session], tokens])[-MATCHED:]
        return [self._draft(session) for session in sessions]

    def _draft(self, session: int) -> Draft:
        draft = self._cache.speculate(
            session,
            self._contexts[session],
            max_spec_tokens=self._max_tokens,
            max_spec_factor=self._settings.max_spec_factor,
            min_token_prob=self._settings.min_token_prob,
        )
        return Draft(np.array(draft.token_ids, np.int32), np.array(draft.probs, np.float32))

    def close(self, session: int) -> None:
        """Stop the request and evict what it wrote."""
        del self._contexts[session]
        self._cache.stop_request(session)
        self._cache.evict_cached_response(session)

    def sources(self) -> Sources:
        """It does not say."""
        return {}
