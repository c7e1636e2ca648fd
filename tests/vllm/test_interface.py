"""What the adapter depends on exists in the vLLM that is installed, and its own mistakes are told at the start."""

import inspect

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture
def adapter():
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    from histospec.client import vllm

    return vllm


def test_the_scheduler_extends_methods_that_exist(adapter):
    from vllm.v1.core.sched.scheduler import Scheduler

    ours = [n for n, m in vars(adapter.HistoSpecScheduler).items() if inspect.isfunction(m) and not _private(n)]
    assert "update_draft_token_ids" in ours
    for name in [*ours, "_free_request"]:
        theirs = inspect.signature(getattr(Scheduler, name)).parameters
        taken = inspect.signature(getattr(adapter.HistoSpecScheduler, name)).parameters
        if not any(p.kind is p.VAR_POSITIONAL for p in taken.values()):
            assert list(taken) == list(theirs), name


def _private(name):
    return name.startswith("_")


def test_a_proposer_without_the_scheduler_says_what_to_add(adapter, engine):
    with pytest.raises(Exception, match="--scheduler-cls histospec"):
        engine("127.0.0.1:9", scheduler_cls=None)


def test_a_scheduler_without_the_proposer_says_what_to_add(adapter, engine):
    with pytest.raises(ValueError, match="--speculative-config"):
        engine("127.0.0.1:9", speculative_config=None)


def test_a_verify_cost_that_is_no_number_is_refused(adapter, engine, monkeypatch):
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "cheap")
    with pytest.raises(Exception, match="HISTOSPEC_VERIFY_COST"):
        engine("127.0.0.1:9")
