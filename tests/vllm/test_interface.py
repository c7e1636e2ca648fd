"""The installed vLLM has what the adapter depends on, and wrong settings fail at the start."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture
def adapter() -> Any:
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    from histospec.client import vllm

    return vllm


def test_the_scheduler_extends_methods_that_exist(adapter: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    ours = [n for n, m in vars(adapter.HistoSpecScheduler).items() if inspect.isfunction(m) and not _private(n)]
    assert "update_draft_token_ids" in ours
    for name in [*ours, "_free_request"]:
        theirs = inspect.signature(getattr(Scheduler, name)).parameters
        taken = inspect.signature(getattr(adapter.HistoSpecScheduler, name)).parameters
        if not any(p.kind is p.VAR_POSITIONAL for p in taken.values()):
            assert list(taken) == list(theirs), name


def _private(name: str) -> Any:
    return name.startswith("_")


def test_a_proposer_without_the_scheduler_says_what_to_add(
    adapter: Any, engine: Callable[..., Any], nowhere: str
) -> None:
    with pytest.raises(Exception, match="--scheduler-cls histospec"):
        engine(nowhere, fresh=True, scheduler_cls=None)


def test_a_scheduler_without_the_proposer_says_what_to_add(
    adapter: Any, engine: Callable[..., Any], nowhere: str
) -> None:
    with pytest.raises(ValueError, match="it needs 'custom_class' with the model"):
        engine(nowhere, fresh=True, speculative_config=None)


def test_a_verify_cost_that_is_no_number_is_refused(
    adapter: Any, engine: Callable[..., Any], nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "cheap")
    with pytest.raises(Exception, match="HISTOSPEC_VERIFY_COST"):
        engine(nowhere, fresh=True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SAMPLING", "paired", "expected 'vllm' or 'coupled', got 'paired'"),
        ("SEED_REFRESH", "1.5", "expected a share from 0 to 1, got 1.5"),
        ("SEED_REFRESH", "half", "expected a number, got 'half'"),
        ("SEED_MAX_AGE", "0", "expected at least 1 visit, got 0"),
        ("SEED_EVERY", "0.5", "expected a number, got '0.5'"),
    ],
)
def test_how_to_sample_is_said_clearly(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    from histospec.client.vllm.config import AdapterConfig

    monkeypatch.setenv("HISTOSPEC_SAMPLING", "coupled")
    monkeypatch.setenv(f"HISTOSPEC_{name}", value)
    with pytest.raises(ValueError, match=f"^HISTOSPEC_{name}: {said}$"):
        AdapterConfig.from_environment()
