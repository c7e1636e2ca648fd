"""The adapter's warning of settings that vLLM ignores, without vLLM; tests/vllm/test_lines.py has the other lines."""

from importlib import metadata
from types import SimpleNamespace

import pytest

from histospec.client.vllm import settings


@pytest.mark.parametrize("names", [[], ["cut", "bias"]])
def test_logits_processors_of_plugins_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    """vLLM loads them without speculation."""
    points = [metadata.EntryPoint(name, "somewhere:Processor", settings.PROCESSORS) for name in names]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "vllm.logits_processors" else [])
    settings.warn_of_processors()
    line = "HistoSpec: with speculation of any kind vLLM does not load logits processors of plug-ins, here bias, cut"
    assert [record.getMessage() for record in caplog.records] == ([line] if names else [])


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("synthetic", "which accepts drafts at random"),
        ("fly", "which accepts tokens that the model would not have sampled"),
        ("typical", "which HistoSpec does not know"),
    ],
)
def test_methods_that_change_the_output_are_refused(method: str, why: str) -> None:
    speculative = SimpleNamespace(method="custom_class", rejection_sample_method=method)
    with pytest.raises(
        ValueError, match=f"^HistoSpec: rejection_sample_method is '{method}', {why}; set it to 'standard'"
    ):
        settings.check_method(speculative)


@pytest.mark.parametrize("exact", [{}, {"rejection_sample_method": "standard"}, {"rejection_sample_method": "block"}])
def test_methods_that_keep_the_output_are_accepted(exact: dict[str, str]) -> None:
    settings.check_method(SimpleNamespace(method="custom_class", **exact))
