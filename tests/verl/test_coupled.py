"""Coupled sampling in verl's real training loop: siblings differ, and a visit repeats the last one while the policy
stays as it is."""

from collections.abc import Callable
from typing import Any

import pytest

from histospec.client import Response
from tests.support.servers import Server

PROMPTS = [[{"role": "user", "content": text}] for text in ("coinone", "cointwo")]
HISTOSPEC = "rollout/histospec/"


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    """Every seed is kept, so that every response repeats."""
    return {"HISTOSPEC_SAMPLING": "coupled", "HISTOSPEC_SEED_REFRESH": "0"}


def test_the_second_visit_drafts_the_first(
    run: Any, loop: Callable[..., Any], history: Callable[..., list[Response]], shared_server: Server
) -> None:
    trainer, steps = loop(run, PROMPTS, PROMPTS, 2)
    first, second = trainer.visits
    assert len({tuple(text) for _, text in first.texts()}) == 4  # two prompts with two siblings: each its own coin
    assert second.texts() == first.texts()
    assert steps[1][f"{HISTOSPEC}accept_rate"] > 0.8
    assert steps[1][f"{HISTOSPEC}tokens_per_step"] > 5
    metrics = shared_server.metrics()
    assert metrics['histospec_twin_lookups_total{namespace="verl",result="hit"}'] >= 4
    for prompt in PROMPTS:
        kept = [response for response in history(prompt, 4) if response.seed is not None]
        assert len({response.seed for response in kept}) == 2
        assert len({(response.seed, tuple(response.tokens)) for response in kept}) == 2
