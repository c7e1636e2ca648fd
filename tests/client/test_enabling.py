"""Which of vLLM's arguments HISTOSPEC_ENABLE=1 fills in, without vLLM; tests/vllm/test_enabling.py has real engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from histospec.client import ConfigurationError
from histospec.client.vllm import settings
from histospec.client.vllm.config import AdapterConfig
from histospec.client.vllm.patches import enabling

FILLED_IN = {"method": "custom_class", "model": settings.PROPOSER, "num_speculative_tokens": 16}
HALF = {"method": "custom_class", "model": settings.PROPOSER, "num_speculative_tokens": 64}
MTP = {"method": "mtp", "num_speculative_tokens": 4}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENABLE", "1"), ("ENDPOINT", "127.0.0.1:9"), ("NAMESPACE", "run")):
        monkeypatch.setenv(f"HISTOSPEC_{name}", value)


def filled_in(runner: str = "generate", parallel: Any = None, **arguments: Any) -> Any:
    """What becomes of EngineArgs with these arguments."""
    usual = {"speculative_config": None, "scheduler_cls": None, "async_scheduling": None, "logits_processors": None}
    engine_args = SimpleNamespace(**usual | arguments)
    one = {"pipeline_parallel_size": 1, "world_size": 1, "distributed_executor_backend": "uni"}
    enabling.fill_in(engine_args, SimpleNamespace(runner_type=runner), SimpleNamespace(**one | (parallel or {})))
    return engine_args.speculative_config, engine_args.scheduler_cls


@pytest.mark.parametrize(
    ("arguments", "speculative", "scheduler"),
    [
        ({}, FILLED_IN, settings.SCHEDULER),
        ({"async_scheduling": False}, FILLED_IN, settings.SCHEDULER),
        ({"speculative_config": HALF}, HALF, settings.SCHEDULER),
        ({"scheduler_cls": settings.SCHEDULER}, FILLED_IN, settings.SCHEDULER),
        ({"parallel": {"distributed_executor_backend": "external_launcher"}}, FILLED_IN, settings.SCHEDULER),
    ],
)
def test_what_is_not_set_is_filled_in(
    caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], speculative: Any, scheduler: Any
) -> None:
    caplog.set_level("INFO", "histospec")
    assert filled_in(**arguments) == (speculative, scheduler)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"HistoSpec: HISTOSPEC_ENABLE is 1: speculative_config is {speculative}, scheduler_cls is {scheduler}"
    )


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"enable_lora": True, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}, 7),
        ({"enable_lora": True, "max_num_seqs": 64, "max_num_batched_tokens": 8192}, 16),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}, 7),
        ({"compilation_config": SimpleNamespace(max_cudagraph_capture_size=12)}, 11),
        ({"max_cudagraph_capture_size": 512, "compilation_config": 3}, 16),
        ({"compilation_config": {"cudagraph_capture_sizes": []}}, 16),
    ],
)
def test_drafts_are_as_long_as_other_settings_allow(
    caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], tokens: int
) -> None:
    """vLLM refuses to start with longer ones."""
    speculative, _ = filled_in(**arguments)
    assert speculative == FILLED_IN | {"num_speculative_tokens": tokens}
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (tokens < 16)
    assert all(line.startswith(f"HistoSpec: drafts of up to {tokens} tokens, not 16: ") for line in said)


def test_all_that_is_set_for_both_drafters_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert filled_in(speculative_config=MTP, scheduler_cls=settings.SCHEDULER) == (MTP, settings.SCHEDULER)
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"speculative_config": MTP}, f"speculative_config is set and wins: {MTP}. Leave it out, or set both"),
        ({"spec_method": "ngram", "spec_tokens": 4}, "speculative_config is set and wins: {'method': 'ngram', "),
        ({"scheduler_cls": "collections.OrderedDict"}, "scheduler_cls is set and wins: collections.OrderedDict"),
        ({"scheduler_cls": dict, "speculative_config": HALF}, "scheduler_cls is set and wins: <class 'dict'>"),
        ({"async_scheduling": True}, "async_scheduling is true"),
        ({"logits_processors": ["a.Bias"]}, "logits_processors are set"),
        ({"enable_lora": True, "max_num_seqs": None, "max_num_batched_tokens": None}, "enable_lora is true"),
        ({"enable_lora": True, "max_num_seqs": 64, "max_num_batched_tokens": 127}, "enable_lora is true"),
        ({"cudagraph_capture_sizes": [1]}, "the largest of cudagraph_capture_sizes is 1; add larger ones"),
        ({"runner": "pooling"}, "its model does not generate text, but is for pooling"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is more than 1"),
        (
            {"parallel": {"distributed_executor_backend": "external_launcher", "world_size": 2}},
            "distributed_executor_backend is 'external_launcher'",
        ),
    ],
)
def test_other_settings_win_and_a_line_says_which(
    caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], said: str
) -> None:
    """One of several models of a run must not end the run, so this is no error."""
    before = arguments.get("speculative_config"), arguments.get("scheduler_cls")
    assert filled_in(**arguments) == before
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"HistoSpec: HISTOSPEC_ENABLE is 1, but this engine starts WITHOUT drafts from the server: {said}"
    )


def test_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_DRAFT_TOKENS", "64")
    assert filled_in() == (FILLED_IN | {"num_speculative_tokens": 64}, settings.SCHEDULER)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ENDPOINT", "", "^HISTOSPEC_ENABLE is 1, but endpoint: .* or set HISTOSPEC_ENDPOINT$"),
        ("NAMESPACE", "", "^HISTOSPEC_ENABLE is 1, but namespace: .* or set HISTOSPEC_NAMESPACE$"),
        ("ENDPOINT", "http://host", "^HISTOSPEC_ENABLE is 1, but endpoint: 'http://host' is not of the form"),
    ],
)
def test_a_missing_setting_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    """Unlike an outage: there would never be a draft. Where other settings win, nothing is needed."""
    monkeypatch.setenv(f"HISTOSPEC_{name}", value)
    with pytest.raises(ConfigurationError, match=said):
        filled_in()
    assert filled_in(speculative_config=MTP) == (MTP, None)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ENABLE", "true", "must be 0 or 1, is 'true'"),
        ("DRAFT_TOKENS", "auto", "expected an integer from 1 to 256, got 'auto'"),
        ("DRAFT_TOKENS", "0", "expected an integer from 1 to 256, got '0'"),
        ("VERIFY_COST", "1e39", "expected 'auto' or a number of at least 0, such as 0.05, got '1e39'"),
        ("MODEL_DRAFT_TOKENS", "-1", "expected 'auto' or an integer from 0 to 256, got '-1'"),
    ],
)
def test_invalid_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(f"HISTOSPEC_{name}", value)
    with pytest.raises(ValueError, match=f"^HISTOSPEC_{name}: {said}$"):
        AdapterConfig.from_environment()
