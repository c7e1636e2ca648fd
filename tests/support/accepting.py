"""A control for the tests of vLLM's model runner V2: its sampler accepts the first token of each draft."""

import importlib
from typing import Any

import pytest


def make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the function that verifies drafts, in this process."""
    sampler: Any = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    verify = sampler.rejection_sample

    def accept(logits: Any, draft_logits: Any, drafted: Any, ends: Any, *args: Any, **named: Any) -> Any:
        sampled, counts = verify(logits, draft_logits, drafted, ends, *args, **named)
        for row, (start, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            if end - start > 1 and (first := drafted[start + 1].item()) >= 0:
                sampled[row, 0] = first
        return sampled, counts

    monkeypatch.setattr(sampler, "rejection_sample", accept)
