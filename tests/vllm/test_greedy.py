"""Greedy output is the same with drafts, without drafts, and during faults of the server."""

from typing import Any

import pytest

from tests.support.engines import Prompts, StartEngine
from tests.support.servers import Server

pytestmark = pytest.mark.vllm


def test_with_drafts(engine: StartEngine, shared_server: Server, prompts: Prompts, expected: list[Prompts]) -> None:
    rollouts = engine(shared_server.endpoint)
    assert rollouts.generate(prompts) == expected  # first visit: wrong drafts and none
    assert rollouts.generate(prompts) == expected  # second: right ones
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 0


def test_with_the_server_killed_and_restarted(
    engine: StartEngine, server: Server, prompts: Prompts, expected: list[Prompts]
) -> None:
    rollouts = engine(server.endpoint)
    assert rollouts.generate(prompts) == expected
    rollouts.start(prompts)
    rollouts.step(2)
    assert rollouts.scheduler.running  # half-way
    server.kill()
    assert rollouts.finish() == expected
    assert rollouts.generate(prompts) == expected  # a whole visit without it
    server.restart()
    accepted = rollouts.counter("spec_decode_num_accepted_tokens")
    for _ in range(100):  # it comes back by itself, in its own time
        assert rollouts.generate(prompts) == expected
        if rollouts.counter("spec_decode_num_accepted_tokens") > accepted:
            return
    pytest.fail("no drafts after the restart")


def test_with_no_server_from_the_start(
    engine: StartEngine, prompts: Prompts, expected: list[Prompts], nowhere: str
) -> None:
    rollouts = engine(nowhere)
    assert rollouts.generate(prompts) == expected
    assert rollouts.counter("spec_decode_num_draft_tokens") == 0


def test_with_a_client_that_fails(
    engine: StartEngine,
    shared_server: Server,
    prompts: Prompts,
    expected: list[Prompts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug of ours costs drafts, never the engine, and not for long."""
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    for failing in ("open", "send", "receive", "close", "flush"):
        with monkeypatch.context() as patch:
            patch.setattr(rollouts.scheduler._sessions.client, failing, fail)
            assert rollouts.generate(prompts) == expected, failing
        accepted = rollouts.counter("spec_decode_num_accepted_tokens")
        assert rollouts.generate(prompts) == expected, failing
        assert rollouts.counter("spec_decode_num_accepted_tokens") > accepted, failing
