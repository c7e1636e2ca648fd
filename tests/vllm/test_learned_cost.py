"""A real engine learns the cost of its drafts, and the server shows it."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from histospec.client.vllm.choice.modes import NOTHING, SERVER
from tests.support.asynchronous import speculator_of
from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.servers import Server
from tests.vllm.conftest import ASYNCHRONOUS

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


@pytest.fixture
def shown(shared_server: Server, namespace: str) -> Callable[..., Any]:
    """The cost as the server shows it now."""
    return lambda: shared_server.metrics()[f'histospec_verify_cost{{namespace="{namespace}"}}']


@pytest.fixture
def engine(engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.delenv("HISTOSPEC_VERIFY_COST")  # as it comes
    return engine


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """report(seconds) sets the time between two messages while drafts cost too much."""

    def every(seconds: float) -> None:
        for module in ("scheduler", "asynchronous.scheduler", "asynchronous.asking"):
            monkeypatch.setattr(f"histospec.client.vllm.{module}.REPORT_SECONDS", seconds)

    return every


def test_learned_and_shown(
    engine: StartEngine, shared_server: Server, prompts: Prompts, shown: Callable[..., Any]
) -> None:
    rollouts = engine(shared_server.endpoint)
    cost = rollouts.scheduler._chooser
    assert not cost.learned
    assert rollouts.scheduler._clock._now is time.process_time  # the model computes here, on the CPU
    for _ in range(60):
        rollouts.generate(prompts, max_tokens=100)
        if cost.learned:
            break
    assert cost.learned
    assert 0.01 <= cost.value <= 1
    assert 0.0099 <= shown() <= 1  # a float32 on the wire


def test_fixed(
    engine: StartEngine,
    shared_server: Server,
    prompts: Prompts,
    shown: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "0.125")
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts)
    assert shown() == 0.125


def test_no_time_is_taken_across_idleness(engine: StartEngine, shared_server: Server, prompts: Prompts) -> None:
    """Between two rollouts a trainer learns for minutes; the first step after it has no duration."""
    rollouts = engine(shared_server.endpoint)
    told: list[Any] = []
    observe = rollouts.scheduler._chooser.observe

    def noting(seconds: float, *others: Any, **more: Any) -> None:
        told.append(seconds)
        observe(seconds, *others, **more)

    rollouts.scheduler._chooser.observe = noting
    for _ in range(2):
        rollouts.generate(prompts, max_tokens=5)
        told.append("idle")
    first = [told[0], told[told.index("idle") + 1]]
    assert all(not 0 < seconds < float("inf") for seconds in first)
    assert sum(0 < s < float("inf") for s in told if s != "idle") == len(told) - 4


def test_a_cost_that_no_draft_can_pay(
    engine: StartEngine,
    shared_server: Server,
    prompts: Prompts,
    expected: list[Prompts],
    make_client: MakeClient,
    shown: Callable[..., Any],
    report: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is drafted, hardly anything is said, and every response is in the history."""
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "1")
    report(3600)  # none is due while slow steps run
    rollouts = engine(shared_server.endpoint)
    for _ in range(2):
        assert rollouts.generate(prompts) == expected
    assert rollouts.counter("spec_decode_num_draft_tokens") == 0
    sessions = speculator_of(rollouts.llm)._asking._sessions if ASYNCHRONOUS else rollouts.scheduler._sessions
    assert sessions.client.stats().steps < 2 * 40 / 4
    assert shown() == 1
    rollouts.close()  # the last commits are out by now
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2


def test_drafts_come_and_go(
    engine: StartEngine, shared_server: Server, prompts: Prompts, expected: list[Prompts], make_client: MakeClient
) -> None:
    """Runs of steps with and without drafts, of every length: sessions catch up, exactly."""
    rollouts = engine(shared_server.endpoint)
    told = (0.02 if (step // run) % 2 else None for run in range(1, 30) for step in range(6 * run))
    rollouts.scheduler._chooser.next = lambda: next(told)
    for _ in range(3):
        assert rollouts.generate(prompts) == expected
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 0
    rollouts.close()
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 3


def silence(chooser: Any) -> None:
    """Makes drafts seem not to pay, with the next trial far away."""
    chooser._back = None
    chooser._enter(NOTHING)
    for _ in range(5):
        chooser._pauses.tried(SERVER, chooser._number, rests=False)


def test_drafts_that_nothing_verifies_say_that_drafts_pay(
    engine: StartEngine, shared_server: Server, prompts: Prompts, expected: list[Prompts]
) -> None:
    rollouts = engine(shared_server.endpoint)
    assert rollouts.generate(prompts) == expected  # from now on its history knows everything
    cost, before = rollouts.scheduler._chooser, rollouts.counter("spec_decode_num_draft_tokens")
    silence(cost)
    assert rollouts.generate(prompts) == expected
    assert cost._worth.promise.tokens > 3
    assert rollouts.counter("spec_decode_num_draft_tokens") > before


def test_drafts_that_nothing_verifies_are_counted_as_such(
    engine: StartEngine,
    shared_server: Server,
    prompts: Prompts,
    expected: list[Prompts],
    make_client: MakeClient,
    namespace: str,
    report: Callable[[float], None],
) -> None:
    """The server counts none of them as drafted, shows the cost that the worker measured, and loses no token."""
    report(0.0)  # a message with each step
    rollouts = engine(shared_server.endpoint)
    assert rollouts.generate(prompts) == expected
    promised: list[Any] = []
    silence(rollouts.scheduler._chooser)
    rollouts.scheduler._chooser.promised = promised.append
    rollouts.scheduler._chooser._pauses.may_try = lambda *_: False  # also where the batch becomes smaller
    of = f'{{namespace="{namespace}"}}'
    before = shared_server.metrics()
    assert rollouts.generate(prompts) == expected
    after = shared_server.metrics()
    assert max(promise.tokens for promise in promised) > 3
    assert after[f"histospec_draft_tokens_total{of}"] == before[f"histospec_draft_tokens_total{of}"]
    assert after[f"histospec_generated_tokens_total{of}"] > before[f"histospec_generated_tokens_total{of}"]
    assert after[f"histospec_verify_cost{of}"] == pytest.approx(rollouts.scheduler._chooser.value)
    assert after[f"histospec_verify_microsteps_total{of}"] == before[f"histospec_verify_microsteps_total{of}"]
    rollouts.close()
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2
