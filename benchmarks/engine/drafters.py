"""The compared drafters behind one interface. Each is called the way an inference engine calls it."""

from typing import Protocol

import numpy as np

from histospec.native import Engine
from histospec.replay.recordings import Tokens

MAX_DRAFT = 16
VERIFY_COST = 0.05
MATCHED = 64  # how many tokens of context Arctic uses


class Drafter(Protocol):
    """One index with its sessions."""

    def ingest(self, prompt: Tokens, responses: list[Tokens]) -> None:
        """Adds finished responses to a problem."""

    def open(self, prompts: list[Tokens], room: int) -> None:
        """Starts one session per prompt, each of which will append at most `room` tokens."""

    def step(self, new: Tokens) -> int:
        """Appends new[b], int32[sessions, n], to session b and drafts for all. Returns the number of drafted tokens."""

    def close(self) -> None:
        """Ends all sessions without committing their tokens."""


class HistoSpec(Drafter):
    """The engine of this project, with one call per step."""

    def __init__(self) -> None:
        self.engine = Engine(memory_bytes=16 << 30)
        self._sessions = np.empty(0, np.int64)

    def ingest(self, prompt: Tokens, responses: list[Tokens]) -> None:
        """Ingests all responses with one call."""
        self.engine.ingest("bench", prompt, responses)

    def open(self, prompts: list[Tokens], room: int) -> None:
        """Opens one session per prompt."""
        self._sessions = np.array([self.engine.open("bench", prompt) for prompt in prompts], np.int64)

    def step(self, new: Tokens) -> int:
        """Steps the whole batch with one call."""
        offsets = np.arange(len(new) + 1, dtype=np.int64) * new.shape[1]
        drafted, _, _ = self.engine.step(
            self._sessions, new.reshape(-1), offsets, max_tokens=MAX_DRAFT, verify_cost=VERIFY_COST
        )
        return len(drafted)

    def close(self) -> None:
        """Closes the sessions without committing."""
        for session in self._sessions:
            self.engine.close(int(session), commit=False)


class Arctic(Drafter):
    """Snowflake's suffix decoding, with the settings and calls of vLLM's proposer: two calls per session and step."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=MATCHED)
        self._finished = 0
        self._contexts = np.empty((0, 0), np.int32)
        self._ends: list[int] = []

    def ingest(self, prompt: Tokens, responses: list[Tokens]) -> None:
        """Adds each response as a request that starts, grows and stops."""
        for response in responses:
            self.cache.start_request(self._finished, prompt)
            self.cache.add_active_response(self._finished, response)
            self.cache.stop_request(self._finished)
            self._finished += 1

    def open(self, prompts: list[Tokens], room: int) -> None:
        """Starts one request per prompt."""
        self._contexts = np.zeros((len(prompts), max(map(len, prompts)) + room), np.int32)
        self._ends = [len(prompt) for prompt in prompts]
        for b, prompt in enumerate(prompts):
            self.cache.start_request(("live", b), prompt)
            self._contexts[b, : len(prompt)] = prompt

    def step(self, new: Tokens) -> int:
        """Makes two calls per session: append, speculate."""
        drafted = 0
        for b, tokens in enumerate(new):
            begin, end = self._ends[b], self._ends[b] + len(tokens)
            self._contexts[b, begin:end] = tokens
            self._ends[b] = end
            self.cache.add_active_response(("live", b), tokens)
            draft = self.cache.speculate(
                ("live", b),
                self._contexts[b, max(0, end - MATCHED) : end],
                max_spec_tokens=MAX_DRAFT,
                max_spec_factor=1.0,
                min_token_prob=0.1,
            )
            drafted += len(draft.token_ids)
        return drafted

    def close(self) -> None:
        """Stops the requests and evicts their responses."""
        for b in range(len(self._ends)):
            self.cache.stop_request(("live", b))
            self.cache.evict_cached_response(("live", b))


def available() -> dict[str, type[Drafter]]:
    """Returns the drafters that are installed, the peers first."""
    found: dict[str, type[Drafter]] = {}
    try:
        import arctic_inference.suffix_decoding  # noqa: F401

        found["Arctic"] = Arctic
    except ImportError:
        pass
    return found | {"HistoSpec": HistoSpec}
