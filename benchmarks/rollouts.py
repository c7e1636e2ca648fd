"""What the benchmarks run on: rollouts made up to look like real ones, or real ones from recordings."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from histospec.server.recordings import Problem, Tokens, read

VOCABULARY = 32_000
PHRASES = 4_000


@dataclass(frozen=True)
class Rollouts:
    """Problems with their history, and responses being written now.

    Attributes:
        name: what they are.
        prompts: int32[n], one a problem.
        history: the finished responses of each problem, int32[n] each.
        live: (problem, response) of every session that is being generated.

    """

    name: str
    prompts: list[Tokens]
    history: list[list[Tokens]]
    live: list[tuple[int, Tokens]]

    def tokens(self) -> int:
        """Tokens of the whole history."""
        return sum(len(response) for responses in self.history for response in responses)


def generated(problems: int, responses: int, length: int, sessions: int = 0, seed: int = 0) -> Rollouts:
    """Responses that retell one another: runs copied from a sibling, broken by tokens of their own.

    A response follows one of its siblings at about the same position for a geometrically distributed run, then says
    one to four tokens of its own and goes on with another sibling. The first response of a problem is a chain of
    phrases that all problems share. benchmarks/README.md compares the repetition with that of recorded rollouts.
    """
    rng = np.random.default_rng(seed)
    phrases = [_words(rng, int(n)) for n in rng.integers(2, 12, PHRASES)]
    rank = 1 / np.arange(1, PHRASES + 1)
    prompts, history, live = [], [], []
    for problem in range(problems):
        prompts.append(_words(rng, int(rng.integers(60, 200))))
        chain = rng.choice(PHRASES, size=length // 2, p=rank / rank.sum())
        texts = [np.concatenate([phrases[i] for i in chain])[:length]]
        writing = len(range(problem, sessions, problems))
        while len(texts) < responses + writing:
            texts.append(_retold(rng, texts[:responses], length))
        history.append(texts[:responses])
        live += [(problem, text) for text in texts[responses:]]
    return Rollouts(f"generated {problems} x {responses} x {length:,}", prompts, history, live)


def _words(rng: np.random.Generator, n: int) -> Tokens:
    """Tokens as frequent as words are."""
    return ((rng.zipf(1.3, n) * 7919) % VOCABULARY).astype(np.int32)


def _retold(rng: np.random.Generator, siblings: list[Tokens], length: int) -> Tokens:
    parts: list[Tokens] = []
    done = 0
    while done < length:
        sibling = siblings[rng.integers(len(siblings))]
        start = max(0, done + int(rng.integers(-8, 9)))
        run = sibling[start : start + int(rng.geometric(1 / 12))]
        own = _words(rng, int(rng.integers(1, 5)))
        parts += [run, own]
        done += len(run) + len(own)
    return np.concatenate(parts)[:length]


def recorded(folder: Path, tokens: int, sessions: int = 0, context: int = 0) -> Iterator[Rollouts]:
    """Every recording of a folder: earlier visits are the history, responses of the last visit are being written.

    Args:
        folder: where the .jsonl and .jsonl.gz files are.
        tokens: stop taking problems when their history holds so many.
        sessions: how many responses are being written; the same ones again where the recording has too few.
        context: shorter responses are not taken for sessions.

    """
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        prompts, history, candidates, held = [], [], [], 0
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
