"""Right, wrong, cut, long and missing drafts at random, without a server, and schedules in which tests verify them."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.tiny_policy import VOCABULARY

Right = Callable[[Any], list[int]]

SCHEDULES = pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 32, "max_num_seqs": 5},  # prompts in chunks, drafts that are cut to the budget
        {"block_size": 32, "num_gpu_blocks_override": 9, "max_model_len": 96},  # requests are preempted
    ],
    ids=["plain", "chunked", "preempted"],
)
"""Arguments of vLLM."""


def rest_of(texts: list[list[int]], text: list[int]) -> list[int]:
    """Returns what the first of the texts that continue a text adds to it."""
    return next((whole[len(text) :] for whole in texts if whole[: len(text)] == text), [])


def tokens(chance: random.Random, right: list[int], longest: int = 16) -> list[int]:
    """Returns a draft that is right for a while, at most `longest` tokens."""
    drafted = [*right, *chance.choices(range(VOCABULARY), k=longest)][: chance.randint(0, longest)]
    if drafted and chance.random() < 0.3:
        drafted[chance.randrange(len(drafted))] = chance.randrange(VOCABULARY)
    return drafted


def make(scheduler: Any, right: Right | list[list[int]], longest: int = 16) -> None:
    """Lets a HistoSpecScheduler draft at random.

    Args:
        scheduler: of an engine in this process.
        right: what continues a request, or the texts that right drafts continue: each prompt with a response.
        longest: of the drafts, in tokens.
    """
    chance = random.Random(5)

    def rest(request: Any) -> list[int]:
        if callable(right):
            return right(request)
        return rest_of(right, [*request.prompt_token_ids, *request.output_token_ids])

    def collect_tokens(vocabulary: int) -> dict[str, list[int]]:
        assert vocabulary == VOCABULARY
        found = {request.request_id: tokens(chance, rest(request), longest) for request in scheduler.running}
        return {name: drafted for name, drafted in found.items() if chance.random() < 0.8}

    scheduler._sessions.collect_tokens = collect_tokens
