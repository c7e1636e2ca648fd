"""The texts of the benchmarks: synthetic rollouts that resemble real ones, or recorded ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from histospec.replay.recordings import Problem, Tokens, read

MILLION = 10**6
BATCH = 256  # sessions per step
SIBLINGS = 16  # sessions per problem
RESPONSES = 16  # responses per problem in the history

VOCABULARY = 32_000
PHRASES = 4_000


@dataclass(frozen=True)
class Rollouts:
    """Problems with their history, and responses of running sessions.

    Attributes:
        name: name of the texts.
        prompts: int32[n], one per problem.
        history: the finished responses of each problem, int32[n] each.
        live: (problem, response) of every running session.

    """

    name: str
    prompts: list[Tokens]
    history: list[list[Tokens]]
    live: list[tuple[int, Tokens]]

    def tokens(self) -> int:
        """Returns the number of tokens of the whole history."""
        return sum(len(response) for responses in self.history for response in responses)


class Texts:
    """Makes synthetic responses that copy runs of tokens from siblings, with tokens of their own in between.

    A response follows one of its siblings, at about the same position, for a run of geometrically distributed length.
    Then it has one to four tokens of its own and continues with another sibling. The first response of a problem is a
    chain of phrases that all problems share. benchmarks/README.md compares the repetition with recorded rollouts.

    The same problem always has the same text, so that a history of any size can be continued without keeping it.
    """

    def __init__(self, length: int = 2000, seed: int = 0) -> None:
        self.length = length
        self._seed = seed
        rng = np.random.default_rng(seed)
        self._words = _words(rng, 1 << 20)
        self._phrases = _words(rng, PHRASES * 12).reshape(PHRASES, 12)
        self._phrase_lengths = rng.integers(2, 12, PHRASES)
        rank = 1 / np.arange(1, PHRASES + 1)
        self._phrase_odds = np.cumsum(rank / rank.sum())

    def problem(self, problem: int, responses: int, more: int = 0) -> tuple[Tokens, list[Tokens]]:
        """Returns the prompt and the responses of a problem, and `more` responses that copy from those."""
        rng = np.random.default_rng((self._seed, problem))
        prompt = self._said(rng, int(rng.integers(60, 200)))
        texts = np.empty((responses + more, self.length), np.int32)
        texts[0] = self._chain(rng)
        for r in range(1, responses + more):
            texts[r] = self._retold(rng, texts[: min(r, responses)])
        return prompt, list(texts)

    def live(self, problems: Iterable[int], responses: int, siblings: int) -> list[tuple[Tokens, Tokens]]:
        """Returns (prompt, response) of `siblings` sessions per problem, whose history is its first `responses`."""
        sessions = []
        for problem in problems:
            prompt, written = self.problem(problem, responses, siblings)
            sessions += [(prompt, response) for response in written[responses:]]
        return sessions

    def _said(self, rng: np.random.Generator, n: int) -> Tokens:
        start = int(rng.integers(len(self._words) - n))
        return self._words[start : start + n]

    def _chain(self, rng: np.random.Generator) -> Tokens:
        chain = np.searchsorted(self._phrase_odds, rng.random(self.length // 2))
        said = np.arange(self._phrases.shape[1]) < self._phrase_lengths[chain, None]
        return self._phrases[chain][said][: self.length]

    def _retold(self, rng: np.random.Generator, siblings: Tokens) -> Tokens:
        runs = self.length  # enough, because each run has at least 2 tokens
        lengths = np.stack([rng.geometric(1 / 12, runs // 2), rng.integers(1, 5, runs // 2)], axis=1)
        ends = np.cumsum(lengths)
        runs = int(np.searchsorted(ends, self.length)) // 2 + 1
        lengths, ends = lengths[:runs], ends[: 2 * runs : 2]
        starts = ends - lengths[:, 0]
        shifts = np.clip(rng.integers(-8, 9, runs), -starts, np.maximum(self.length - ends, -starts))
        sources = rng.integers(len(siblings), size=runs) * self.length + shifts
        each = lengths.sum(axis=1)
        copied = np.arange(self.length) + np.repeat(sources, each)[: self.length]
        own = np.arange(self.length) >= np.repeat(ends, each)[: self.length]
        return np.where(own, self._said(rng, self.length), siblings.reshape(-1)[np.minimum(copied, siblings.size - 1)])


def _words(rng: np.random.Generator, n: int) -> Tokens:
    """Returns random tokens with the frequencies of words."""
    return ((rng.zipf(1.3, n) * 7919) % VOCABULARY).astype(np.int32)


def generated(problems: int, responses: int, length: int, sessions: int = 0, seed: int = 0) -> Rollouts:
    """Returns synthetic rollouts, with the sessions spread evenly over the problems."""
    texts = Texts(length, seed)
    prompts, history, live = [], [], []
    for problem in range(problems):
        writing = len(range(problem, sessions, problems))
        prompt, written = texts.problem(problem, responses, writing)
        prompts.append(prompt)
        history.append(written[:responses])
        live += [(problem, text) for text in written[responses:]]
    return Rollouts(f"generated {problems} x {responses} x {length:,}", prompts, history, live)


def recorded(folder: Path, tokens: int, sessions: int = 0, context: int = 0) -> Iterator[Rollouts]:
    """Yields every recording of a folder. Earlier visits are the history, responses of the last visit the sessions.

    Args:
        folder: folder with .jsonl and .jsonl.gz files.
        tokens: take problems until their history has this many tokens.
        sessions: number of sessions; responses repeat if the recording has too few.
        context: sessions have only responses that are longer than this.

    """
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        prompts: list[Tokens] = []
        history: list[list[Tokens]] = []
        candidates: list[tuple[int, Tokens]] = []
        held = 0
        with path.open("rb") as file:
            for problem in read(file):
                known, last = _visits(problem)
                if not known or held >= tokens:
                    continue
                held += sum(map(len, known))
                candidates += [(len(prompts), response) for response in last if len(response) >= context]
                prompts.append(problem.prompt)
                history.append(known)
        live = [candidates[i % len(candidates)] for i in range(sessions)] if candidates else []
        yield Rollouts(path.name.split(".")[0], prompts, history, live)


def _visits(problem: Problem) -> tuple[list[Tokens], list[Tokens]]:
    last = problem.epochs()[-1]
    known = [response.flat() for response in problem.responses if response.epoch < last]
    return known, [response.flat() for response in problem.responses if response.epoch == last]
