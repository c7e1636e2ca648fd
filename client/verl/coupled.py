"""The seeds of coupled sampling in verl (docs/coupled.md).

The worker chooses the seeds, because it stores the responses: the next visit finds a response by its seed. Only verl's
queue numbers the siblings of a problem. Without it, the vLLM adapter numbers them and chooses the seeds.
"""

import contextvars
import functools
from collections.abc import Mapping
from typing import Any

from histospec.client.seeds import SeedPolicy
from histospec.client.verl import history
from histospec.client.vllm.config import AdapterConfig

_drawn = contextvars.ContextVar[int | None]("seed", default=None)


def drawn() -> int | None:
    """Returns the seed of this task's rollout; None if `draw` gave it none."""
    return _drawn.get()


def draw(given: int | None, problem: str, trajectory: Mapping[str, Any], sibling: int | None) -> int | None:
    """Returns the seed of a rollout, or None, and sets `drawn` for the calling task and the tasks that it starts.

    Args:
        given: a seed from verl.
        problem: the problem id.
        trajectory: verl's facts about the rollout: its step, and whether it is for validation, which shares no seed
            with training.
        sibling: its number among the rollouts of the problem; None if unknown.

    Raises:
        ValueError: HISTOSPEC_SAMPLING or HISTOSPEC_SEED_… is malformed.
    """
    seed, policy = given, _policy()
    if seed is None and policy is not None and sibling is not None and not trajectory["validate"]:
        sample = f"{history.client().config.namespace}\0{problem}\0{sibling}"
        seed = policy.seed(sample.encode(), max(0, int(trajectory["step"])))
    _drawn.set(seed)
    return seed


@functools.cache
def _policy() -> SeedPolicy | None:
    return AdapterConfig.from_environment().seeds
