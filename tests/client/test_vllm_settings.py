"""The adapter's warning of settings that vLLM ignores, without vLLM; tests/vllm/test_lines.py has the other lines."""

from importlib import metadata

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
