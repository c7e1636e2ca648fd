"""The worker of messages.py: runs with the client of any checkout, so it imports nothing else of this one.

Reads lines "SESSIONS STEPS PAUSE JITTER": so many steps, each after a pause of PAUSE seconds on average (a gamma
distribution with the coefficient of variation JITTER). Answers each line with "warm" before the first measured step,
and then with JSON: the seconds of every step without the pauses, and the CPU seconds of the process.
"""

import json
import sys
import time

import numpy as np

from histospec.client import DraftClient, Response

NAMESPACE = "messages"
PROBLEMS, RESPONSES, LENGTH = 8, 8, 2000
GENERATED = 3  # tokens per session and step
WARM = 60  # steps before the first turn of a batch; a turn begins with a sixth of it


class Batch:
    """Sessions that write known text, over and over; each step has the same work."""

    def __init__(self, client: DraftClient, texts: list[list[list[int]]], size: int) -> None:
        self._client = client
        self._texts = texts
        self._size = size
        self._at = LENGTH
        self._sessions: list[int] = []

    def step(self, pause: float) -> float:
        """Makes a step after a pause. Returns its seconds, without the pause."""
        if self._at + GENERATED > LENGTH:
            self._client.finish(self._sessions, commit=False)
            self._sessions = self._client.open([[1 + row % PROBLEMS] for row in range(self._size)])
            self._at = 0
        new = [self._text(row)[self._at : self._at + GENERATED] for row in range(self._size)]
        self._at += GENERATED
        if pause:
            time.sleep(pause)
        started = time.perf_counter()
        self._client.step(self._sessions, new)
        return time.perf_counter() - started

    def _text(self, row: int) -> list[int]:
        return self._texts[row % PROBLEMS][row // PROBLEMS % RESPONSES]


def ingested(client: DraftClient, rng: np.random.Generator) -> list[list[list[int]]]:
    """Ingests a history for each problem. Returns further texts of each, which differ from it as much as its own do."""
    texts = []
    for problem in range(PROBLEMS):
        first = rng.integers(0, 32_000, LENGTH)
        changed = [np.where(rng.random(LENGTH) < 0.12, rng.integers(0, 32_000, LENGTH), first) for _ in range(16)]
        client.ingest([1 + problem], [Response(text) for text in changed[:RESPONSES]], epoch=0)
        texts.append([text.tolist() for text in changed[RESPONSES:]])
    return texts


def main() -> None:
    """Serves turns until its input ends."""
    rng = np.random.default_rng(0)
    with DraftClient(sys.argv[1], NAMESPACE, deadline=1.0) as client:
        texts = ingested(client, rng)
        batches: dict[int, Batch] = {}
        for words in sys.stdin:
            size, steps = map(int, words.split()[:2])
            pause, jitter = map(float, words.split()[2:])
            warm = WARM // 6 if size in batches else WARM
            batch = batches.setdefault(size, Batch(client, texts, size))
            pauses = iter(
                rng.gamma(jitter**-2, pause * jitter**2, warm + steps) if jitter else [pause] * (warm + steps)
            )
            for _ in range(warm):
                batch.step(next(pauses))
            print("warm", flush=True)
            busy = time.process_time()
            seconds = [batch.step(length) for length in pauses]
            print(json.dumps([seconds, time.process_time() - busy]), flush=True)


if __name__ == "__main__":
    main()
