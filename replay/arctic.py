"""Arctic's suffix decoding on the cases of a replay, if it is installed, for comparison on the same text.

It does not know the cost of a draft token. So it is replayed with each setting of a grid, and at every cost its best
setting counts. Users get less, because they must choose a setting before the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from histospec.replay.drafters import Draft, Drafter, Sources
from histospec.replay.recordings import Tokens
from histospec.replay.scores import Case, Score, follow, teach
from histospec.server.errors import ConfigError

PACKAGE = "arctic-inference"
MODULE = "arctic_inference.suffix_decoding"
MATCHED = 64  # tokens of context to look up


class Settings(NamedTuple):
    """Arctic's two settings: the minimum probability of a token, and the maximum of draft length / match length."""

    min_token_prob: float
    max_spec_factor: float


GRID = tuple(Settings(*values) for values in product((0.1, 0.2, 0.35, 0.5), (1.0, 2.0)))


@dataclass(frozen=True)
class Peer:
    """Another drafter on the headline's cases: its name with version, and one score per setting."""

    name: str
    scores: dict[Settings, Score]

    def best(self, cost: float) -> tuple[Settings, Score]:
        """Returns the setting with the highest S_c at this cost."""
        return max(self.scores.items(), key=lambda item: item[1].speed_up(cost))


def require() -> None:
    """Checks that the other drafter can run here.

    Raises:
        ConfigError: the package is not installed; the message says how to get it.

    """
    try:
        import_module(MODULE)
    except ImportError:
        raise ConfigError(
            f"--compare arctic: the package {PACKAGE} is not installed; "
            f"`pip install --no-deps {PACKAGE}==0.1.1` is enough for its drafter"
        ) from None


def replay(cases: Sequence[Case], max_tokens: int, done: Callable[[Case], None]) -> Peer:
    """Replays the cases with each setting of the grid.

    Each setting has its own index: evicting a target leaves traces that would help the next setting (measured: 2 %).
    """
    scores = {}
    for settings in GRID:
        drafter = ArcticDrafter(max_tokens, settings)
        teach(drafter, cases)
        scores[settings] = follow(drafter, cases, 0.0, done)
    return Peer(f"Arctic {metadata.version(PACKAGE)}", scores)


class ArcticDrafter(Drafter):
    """Snowflake's suffix decoding with the calls of vLLM's own proposer: two per session and step."""

    def __init__(self, max_tokens: int, settings: Settings) -> None:
        self._cache: Any = import_module(MODULE).SuffixDecodingCache(max_tree_depth=MATCHED)
        self._max_tokens = max_tokens
        self._requests = 0
        self._contexts: dict[int, Tokens] = {}  # the last tokens of each session
        self._settings = settings

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        """Adds each response as a request that starts, grows and stops."""
        for response in responses:
            request = self._start(prompt)
            self._cache.add_active_response(request, response)
            self._cache.stop_request(request)

    def open(self, prompt: Tokens) -> int:
        """Starts a request."""
        session = self._start(prompt)
        self._contexts[session] = prompt[-MATCHED:]
        return session

    def _start(self, prompt: Tokens) -> int:
        self._requests += 1
        self._cache.start_request(self._requests, prompt)
        return self._requests

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        """Appends for all sessions, then speculates for each."""
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
        """Stops the request and evicts what it wrote."""
        del self._contexts[session]
        self._cache.stop_request(session)
        self._cache.evict_cached_response(session)

    def sources(self) -> Sources:
        """Returns nothing: Arctic does not report sources."""
        return {}
