"""Runs that roll out against a server, so that the status page and dashboards have data."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from histospec.client import DraftClient, Response
from histospec.server.commands.bench_worker import generated
from tests.support.rollouts import roll_out

VOCABULARY = 5000
EPOCHS = 6
PAUSE = 0.02
"""Seconds between two steps of a repeated rollout."""


@contextmanager
def repeated(rollout: Callable[[], Iterator[None]]) -> Iterator[None]:
    """Repeats a rollout, which yields after every step, in a thread until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            for _ in rollout():
                if over.wait(PAUSE):
                    break

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def known_problems(client: DraftClient) -> Callable[[], Iterator[None]]:
    """A rollout of problems with a history; it writes the texts that the history has."""
    tasks = [generated(number, EPOCHS + 1, 1, 300) for number in range(8)]
    for task in tasks:
        for epoch in range(EPOCHS):
            client.ingest(task.prompt, [Response(task.history[epoch])], epoch=epoch)
    texts = [text.tolist() for task in tasks for text in (task.history[EPOCHS], *task.texts)]
    prompts = [task.prompt.tolist() for task in tasks for _ in range(2)]
    return lambda: roll_out(client, prompts, texts, EPOCHS, seeds=range(len(texts)))


def new_problems(client: DraftClient) -> Callable[[], Iterator[None]]:
    """A rollout whose problems are new each time. Each text repeats itself, so that there is something to draft."""
    numbers = count(1)

    def rollout() -> Iterator[None]:
        sessions = client.open([[9, next(numbers)] for _ in range(8)])
        for _ in range(4):
            client.step(sessions, [[5, 6, 7, 8, 5, 6]] * len(sessions))
            yield
        client.close(sessions, commit=False)

    return rollout


class Run:
    """A run of `problems` prompts, each sampled `siblings` times per epoch by a policy that changes between epochs."""

    def __init__(self, client: DraftClient, problems: int = 16, siblings: int = 4, length: int = 120) -> None:
        self._client = client
        self._random = np.random.default_rng(0)
        self._siblings = siblings
        self._policy = self._random.integers(10, VOCABULARY, (problems, length))
        self.epoch = 0

    def rolls_out(self, changes: float = 0.1, pause: float = 0.0) -> None:
        """Rolls out every prompt in one batch. `changes`: the share of tokens that the policy now writes differently.

        pause: seconds between steps, as a model takes them.
        """
        self._policy = self._changed(self._policy, changes / 2)
        texts = [self._changed(text, changes / 2).tolist() for text in self._policy for _ in range(self._siblings)]
        prompts = [[1, 2, problem] for problem in range(len(self._policy)) for _ in range(self._siblings)]
        for _ in roll_out(self._client, prompts, texts, self.epoch):
            time.sleep(pause)
        self._client.flush()
        self.epoch += 1

    def _changed(
        self, text: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", share: float
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        other = self._random.integers(10, VOCABULARY, text.shape)
        return np.where(self._random.random(text.shape) < share, other, text)
