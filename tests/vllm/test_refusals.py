"""Settings that do not work with the server's drafts: the error says what to set."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from histospec.client.vllm import settings

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

OWN = {"method": "custom_class", "model": settings.PROPOSER}


@pytest.fixture
def configured(tiny_model: str, drafter: Callable[..., Any]) -> Callable[..., Any]:
    """configured(speculative, ...) -> vLLM's own configuration of an engine; arguments are vLLM's."""

    def make(speculative: dict[str, Any], **arguments: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        usual = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
        usual |= {"scheduler_cls": "histospec.client.vllm.HistoSpecScheduler", "async_scheduling": False}
        method = drafter("draft_model", 4) | speculative
        return EngineArgs(model=tiny_model, speculative_config=method, **usual | arguments).create_engine_config()

    return make


@pytest.mark.parametrize(
    ("speculative", "arguments", "refused"),
    [
        ({"draft_sample_method": "probabilistic"}, {}, "draft_sample_method is 'probabilistic', .* set it to 'greedy'"),
        (
            {},
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            "pipeline_parallel_size is more than 1",
        ),
        ({"num_speculative_tokens": 2000}, {}, "num_speculative_tokens is 2000; must be at most"),
        (
            {"num_speculative_tokens_per_batch_size": [(1, 8, 3), (9, 16, 1)]},
            {},
            "num_speculative_tokens_per_batch_size is set, .* leave it out",
        ),
        (
            {"method": "ngram_gpu", "model": None},
            {},
            "method 'ngram_gpu'; it needs 'custom_class' .* mtp, eagle, eagle3",
        ),
    ],
    ids=["probabilistic", "pipeline", "long", "by_batch", "unknown"],
)
def test_settings(configured: Callable[..., Any], speculative: Any, arguments: Any, refused: str) -> None:
    with pytest.raises(ValueError, match=f"^HistoSpec.*{refused}") as raised:
        settings.check(configured(speculative, **arguments))
    assert "\n" not in str(raised.value)


def test_asynchronous_scheduling(configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured({})
    monkeypatch.setattr(type(config), "use_v2_model_runner", False, raising=False)  # which `make test-v2` chooses
    config.scheduler_config.async_scheduling = True  # which vLLM itself turns off on a CPU
    with pytest.raises(ValueError, match=r"async_scheduling is on, .* set it to false \(--no-async-scheduling\)"):
        settings.check(config)


@pytest.mark.parametrize(
    ("speculative", "sampling", "refused"),
    [
        (OWN, "vllm", None),
        ({}, "vllm", "V2, which keeps the drafts of the method 'draft_model' on the device, .*=0; for the server's"),
        (OWN, "coupled", None),
    ],
    ids=["server", "both", "coupled"],
)
def test_model_runner_v2(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, speculative: Any, sampling: str, refused: str
) -> None:
    config = configured(speculative)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)  # which vLLM does not choose without Triton
    monkeypatch.setenv("HISTOSPEC_SAMPLING", sampling)
    with contextlib.nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
        settings.check(config)


@pytest.mark.parametrize("setting", ["watermark_config", "model_config.use_fp64_gumbel"])
def test_coupled_sampling_with_other_noise(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    config = configured(OWN)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    monkeypatch.setenv("HISTOSPEC_SAMPLING", "coupled")
    settings.check(config)
    *owner, name = setting.split(".")
    setattr(getattr(config, *owner) if owner else config, name, True)
    with pytest.raises(ValueError, match=rf"{name} is set, .*; leave one of them out"):
        settings.check(config)


@pytest.mark.parametrize(("plugins", "fits"), [("other", False), ("", False), ("other,histospec", True)])
def test_plugins_without_ours(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, plugins: str, fits: bool
) -> None:
    """It prepares the workers: without it, vLLM's CPU build would sample wrongly."""
    config = configured(OWN)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    if fits:
        settings.check(config)
        return
    with pytest.raises(ValueError, match=f"VLLM_PLUGINS is {plugins!r}, without 'histospec', .*; add it"):
        settings.check(config)


def test_an_engine_that_starts_says_it(
    engine: Callable[..., Any], nowhere: str, drafter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it loads the model, which may take minutes."""
    loaded = []
    monkeypatch.setattr("vllm.v1.worker.cpu_model_runner.get_model", lambda **_: loaded.append(1))
    speculative = drafter("draft_model", 4) | {"draft_sample_method": "probabilistic"}
    with pytest.raises(ValueError, match="set it to 'greedy'"):
        engine(nowhere, speculative_config=speculative)
    assert not loaded
