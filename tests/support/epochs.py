"""Epochs of an RL run against a draft server, with repeated prompts and a changing policy."""

import time
from collections.abc import Sequence

import numpy as np

from histospec.client import DraftClient
from tests.support.rollouts import verified

VOCABULARY = 5000


class Run:
    """A run of `problems` prompts, each sampled `siblings` times an epoch by a policy that changes between epochs."""

    def __init__(self, client: DraftClient, problems: int = 16, siblings: int = 4, length: int = 120) -> None:
        self._client = client
        self._random = np.random.default_rng(0)
        self._siblings = siblings
        self._policy = self._random.integers(10, VOCABULARY, (problems, length))
        self.epoch = 0

    def rolls_out(self, changes: float = 0.1, pause: float = 0.0) -> None:
        """One epoch: every prompt in one batch. `changes`: the share of tokens that the policy now writes differently.

        pause: seconds between steps, as a model takes them.
        """
        some = self._random.random(self._policy.shape) < changes / 2
        self._policy = np.where(some, self._random.integers(10, VOCABULARY, some.shape), self._policy)
        texts = [self._sampled(text, changes / 2) for text in self._policy for _ in range(self._siblings)]
        prompts = [[1, 2, problem] for problem in range(len(self._policy)) for _ in range(self._siblings)]
        self._write(prompts, texts, pause)
        self._client.flush()
        self.epoch += 1

    def _sampled(self, text: "np.ndarray[tuple[int], np.dtype[np.int64]]", changes: float) -> list[int]:
        other = self._random.integers(10, VOCABULARY, len(text))
        return [int(token) for token in np.where(self._random.random(len(text)) < changes, other, text)]

    def _write(self, prompts: Sequence[list[int]], texts: Sequence[list[int]], pause: float) -> None:
        sessions = self._client.open(prompts)
        written, new = [0] * len(texts), [text[:1] for text in texts]
        while any(new):
            written = [done + len(some) for done, some in zip(written, new, strict=True)]
            running = [i for i, text in enumerate(texts) if written[i] < len(text)]
            drafts = dict(
                zip(running, self._client.step([sessions[i] for i in running], [new[i] for i in running]), strict=True)
            )
            ended = [i for i, some in enumerate(new) if some and i not in drafts]
            if ended:
                self._client.step([sessions[i] for i in ended], [new[i] for i in ended], max_tokens=0)
                self._client.close([sessions[i] for i in ended], epochs=self.epoch)
            new = [
                verified(drafts[i].tokens.tolist(), text[written[i] :]) if i in drafts else []
                for i, text in enumerate(texts)
            ]
            time.sleep(pause)
