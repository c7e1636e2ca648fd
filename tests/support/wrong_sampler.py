"""A sampler of model runner V2 that does not verify: a control of tests that compare outputs."""

from typing import Any

import pytest


def accept_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the sampler accept the first drafted token of each request, whatever it is."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    verify = rejection_sampler.rejection_sample

    def accept(logits: Any, draft_logits: Any, drafted: Any, ends: Any, *args: Any, **named: Any) -> Any:
        sampled, counts = verify(logits, draft_logits, drafted, ends, *args, **named)
        for row, (start, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            if end - start > 1 and (first := drafted[start + 1].item()) >= 0:
                sampled[row, 0] = first
        return sampled, counts

    monkeypatch.setattr(rejection_sampler, "rejection_sample", accept)
