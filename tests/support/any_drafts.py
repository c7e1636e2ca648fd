"""Right, wrong, cut, long and missing drafts at random, without a server."""

import random
from typing import Any

import numpy as np

from histospec.client import Draft
from tests.support.tiny_policy import VOCABULARY


def make(scheduler: Any, texts: list[list[int]], longest: int = 16) -> None:
    """Lets a HistoSpecScheduler draft at random.

    Args:
        scheduler: of an engine in this process.
        texts: what right drafts continue: each prompt with a response.
        longest: of the drafts, in tokens.
    """
    chance = random.Random(5)

    def draft(request: Any) -> Draft | None:
        text = [*request.prompt_token_ids, *request.output_token_ids]
        right = next((whole[len(text) :] for whole in texts if whole[: len(text)] == text), [])
        tokens = [*right, *chance.choices(range(VOCABULARY), k=longest)][: chance.randint(0, longest)]
        if tokens and chance.random() < 0.3:
            tokens[chance.randrange(len(tokens))] = chance.randrange(VOCABULARY)
        return Draft(np.array(tokens, np.int32), np.ones(len(tokens), np.float32)) if chance.random() < 0.8 else None

    def collect() -> dict[str, Draft]:
        found = {request.request_id: draft(request) for request in scheduler.running}
        return {name: one for name, one in found.items() if one is not None}

    scheduler._sessions.collect = collect
