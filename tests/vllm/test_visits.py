"""Earlier responses become drafts; the tests count the steps of each request in the scheduler."""

from typing import Any

import pytest

from tests.support.engines import Prompts, StartEngine
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


def tokens_a_step(rollouts: Any, prompts: Prompts, **sampling: Any) -> Any:
    before = rollouts.verified
    responses = rollouts.generate(prompts, **sampling)
    return sum(len(r) for group in responses for r in group) / (rollouts.verified - before)


def test_second_visit(engine: StartEngine, shared_server: Server, prompts: Prompts) -> None:
    rollouts = engine(shared_server.endpoint)
    first = tokens_a_step(rollouts, prompts)
    second = tokens_a_step(rollouts, prompts)
    assert second > 1.5
    assert second > first


def test_second_visit_at_temperature_one(engine: StartEngine, shared_server: Server, prompts: Prompts) -> None:
    """Other samples of the same policy: the drafts are sometimes right and sometimes not."""
    rollouts = engine(shared_server.endpoint)
    for _ in range(2):
        tokens_a_step(rollouts, prompts, temperature=1, n=4)
    accepted = rollouts.counter("spec_decode_num_accepted_tokens")
    drafted = rollouts.counter("spec_decode_num_draft_tokens")
    assert 0 < accepted < drafted


def test_near_the_end_of_the_model(engine: StartEngine, shared_server: Server) -> None:
    """One request about to reach max_model_len takes no drafts from the others."""
    long, short = [1, 2, 3] * 70, [4, 5, 6]
    rollouts = engine(shared_server.endpoint, max_model_len=256)
    rollouts.generate([short], max_tokens=30)
    responses = rollouts.generate([long], max_tokens=46)
    before, drafted = rollouts.verified, rollouts.counter("spec_decode_num_draft_tokens")
    again = rollouts.generate([long, short], max_tokens=46)
    assert again[0] == responses[0]
    assert len(again[0][0]) == 46  # 210 + 46 is the very last position
    assert rollouts.counter("spec_decode_num_draft_tokens") > drafted
    assert rollouts.verified - before < 2 * 46 / 1.5
