"""Runs that keep a server busy, so that dashboards have data."""

import threading
from abc import ABC, abstractmethod
from itertools import count
from typing import Any

import numpy as np

from histospec.client import Draft, DraftClient, Response
from histospec.server.commands.bench_worker import generated

EPOCHS = 6


class Run(ABC):
    """Rollouts of one run in a thread of their own, again and again, until `stop`."""

    def __init__(self, client: DraftClient) -> None:
        self.client = client
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @abstractmethod
    def roll_out(self) -> None:
        """Opens sessions, steps them and closes them; ends early when `stopping` is set."""

    def _run(self) -> None:
        while not self.stopping.is_set():
            self.roll_out()

    def stop(self) -> None:
        """Ends the rollouts."""
        self.stopping.set()
        self._thread.join()


class Rollouts(Run):
    """Sessions of known problems that write what is written in their texts, epoch after epoch."""

    def __init__(self, client: DraftClient) -> None:
        self._tasks = [generated(number, EPOCHS + 1, 1, 300) for number in range(8)]
        for task in self._tasks:
            for epoch in range(EPOCHS):
                client.ingest(task.prompt, [Response(task.history[epoch])], epoch=epoch)
        super().__init__(client)

    def roll_out(self) -> None:
        """See Run."""
        texts = [text for task in self._tasks for text in (task.history[EPOCHS], *task.texts)]
        sessions = self.client.open([t.prompt for t in self._tasks for _ in range(2)], seeds=range(len(texts)))
        done = [0] * len(sessions)
        new = [text[:1] for text in texts]
        while any(map(len, new)) and not self.stopping.is_set():
            drafts = self.client.step(sessions, new, verify_cost=0.05)
            done = [at + len(tokens) for at, tokens in zip(done, new, strict=True)]
            new = [
                text[at : at + right(draft, text[at:]) + 1] for text, at, draft in zip(texts, done, drafts, strict=True)
            ]
            self.stopping.wait(0.02)
        self.client.close(sessions, commit=True, epochs=EPOCHS)


class Strangers(Run):
    """Sessions of new problems each time: a run without cache hits."""

    def __init__(self, client: DraftClient) -> None:
        self._numbers = count(1)
        super().__init__(client)

    def roll_out(self) -> None:
        """See Run. Each text repeats itself, so that there is something to draft."""
        sessions = self.client.open([[9, next(self._numbers)] for _ in range(8)])
        for _ in range(4):
            self.client.step(sessions, [[5, 6, 7, 8, 5, 6]] * len(sessions), verify_cost=0.05)
            self.stopping.wait(0.02)
        self.client.close(sessions, commit=False)


def right(draft: Draft, text: Any) -> int:
    """How many tokens of a draft the text begins with."""
    drafted = draft.tokens[: len(text)]
    wrong = np.flatnonzero(drafted != text[: len(drafted)])
    return int(wrong[0]) if wrong.size else len(drafted)
