"""verl's real training loop with its queue: the metrics in its logger, and SPEC-RL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.verl_batches import LETTERS

PROMPTS = [[{"role": "user", "content": text}] for text in ("trainone", "traintwo", "morewords", "lastprompt")]
UNSEEN = [[{"role": "user", "content": text}] for text in ("validation", "isanother", "textaltogether")]
OURS = "rollout/histospec/"
NAMES = {f"{OURS}{name}" for name in ("accept_rate", "tokens_per_step", "cache_hit_rate", "draft_share")}


def test_the_metrics_of_each_step_are_in_the_logger(run: Any, loop: Callable[..., Any]) -> None:
    """The second visit drafts from the first. The validation after it, of unknown prompts, does not count."""
    trainer, steps = loop(run, PROMPTS, UNSEEN, 2, "actor_rollout_ref.rollout.temperature=0.05")
    assert [step["training/global_step"] for step in steps] == [1, 2]
    assert [len(visit.responses) for visit in trainer.visits] == [8, 8]
    first, second = ({name: value for name, value in step.items() if name.startswith(OURS)} for step in steps)
    assert set(second) == NAMES
    assert set(first) <= NAMES
    assert first[f"{OURS}cache_hit_rate"] < 1 == second[f"{OURS}cache_hit_rate"]
    assert second[f"{OURS}tokens_per_step"] > max(1.5, first[f"{OURS}tokens_per_step"])
    assert 0.3 < second[f"{OURS}accept_rate"] <= 1
    assert 0.3 < second[f"{OURS}draft_share"] <= 1
    assert any(name.startswith("val-") for name in steps[1])


def test_reuse_in_the_loop(run: Any, loop: Callable[..., Any], lines: Callable[..., list[str]], tmp_path: Path) -> None:
    """The policy stays as it is, so SPEC-RL keeps what the first visit wrote: each sibling another response."""
    (page,) = lines("SPEC-RL", "yaml")
    (tmp_path / "spec_rl.yaml").write_text(page)
    told = [line.replace("spec_rl.yaml", str(tmp_path / "spec_rl.yaml")) for line in lines("SPEC-RL")]
    prompts = [[{"role": "user", "content": text}] for text in ("reusedone", "reusedtwo")]
    trainer, steps = loop(run, prompts, UNSEEN, 2, *told)
    first, second = trainer.visits
    assert [extra["reused_tokens"] for extra in first.extra] == [0] * 4
    assert [extra["reused_tokens"] for extra in second.extra] == [60] * 4
    assert {extra["lenience"] for extra in second.extra} == {1.65}
    assert second.texts() == first.texts()
    assert len({tuple(text) for _, text in first.texts()}) == 4
    assert [set(prompt) <= set(range(len(LETTERS))) for prompt in first.prompts] == [True] * 4
    assert len(steps) == 2


def test_a_trainer_without_a_server_trains_without_the_metrics(
    run: Any, loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HISTOSPEC_ENDPOINT")
    _, steps = loop(run, PROMPTS[:2], UNSEEN, 1)
    assert [name for name in steps[0] if name.startswith(OURS)] == []
