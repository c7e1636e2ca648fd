"""The RL run of examples/tiny_rl in two parts: training, which keeps the policies of all epochs, and rollouts."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
import torch
from transformers import LlamaForCausalLM

from examples.tiny_rl import grpo, policy, task
from examples.tiny_rl.loop import Settings
from examples.tiny_rl.rollout import RolloutEngine
from histospec.client.vllm.patches import cpu


def settings(quick: bool) -> Settings:
    """The size of the run."""
    size = replace(Settings(), concurrency=16)
    return replace(size, epochs=3, problems=8) if quick else size


def problems(size: Settings) -> list[task.Problem]:
    """The problems of the run."""
    return task.problems(size.problems, Random(size.seed))


def prompts(size: Settings) -> list[list[int]]:
    """Their prompts."""
    return [problem.prompt for problem in problems(size)]


def train(
    folder: Path,
    size: Settings,
    model: LlamaForCausalLM | None = None,
    options: dict[str, Any] | None = None,
    minibatches: int = 4,
) -> None:
    """Trains a policy on rollouts without drafts. Writes the policy for the rollouts of epoch N to `folder/N`.

    Args:
        folder: folder of the policies.
        size: see `settings`.
        model: the policy of epoch 1, in place of the demo's.
        options: vLLM's arguments for it.
        minibatches: updates per pass; more of them need less memory.

    """
    torch.manual_seed(size.seed)
    repeated = [problem for problem in problems(size) for _ in range(size.samples)]
    model = model or policy.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.save_pretrained(folder / "1")
    engine = RolloutEngine(folder / "1", 64, options or {})
    for epoch in range(1, size.epochs):
        rollouts = engine.generate(prompts(size), size.samples, epoch)
        rewards = [p.reward(response) for p, response in zip(repeated, rollouts.responses, strict=True)]
        table = torch.tensor(rewards).view(size.problems, size.samples)
        samples = [p.prompt for p in repeated], rollouts.responses
        grpo.update(model, optimizer, *samples, table, minibatches=minibatches)
        engine.push(model)
        model.save_pretrained(folder / str(epoch + 1))
        print(f"trained epoch {epoch}: reward {table.mean():.3f}", file=sys.stderr)


def roll_out(folder: Path, size: Settings, options: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Generates the rollouts of all epochs with the policies of `train` and vLLM's arguments `options`.

    Yields:
        The counts of each epoch.
    """
    cpu.install()  # without it, vLLM's CPU build rejects drafts at random (see client/vllm/patches/cpu.py)
    engine = RolloutEngine(folder / "1", size.concurrency, options)
    engine.warm_up()
    repeated = [problem for problem in problems(size) for _ in range(size.samples)]
    for epoch in range(1, size.epochs + 1):
        engine.push(LlamaForCausalLM.from_pretrained(folder / str(epoch)))
        rollouts = engine.generate(prompts(size), size.samples, epoch)
        counts = rollouts.counts
        yield {
            "tokens": rollouts.tokens,
            "steps": counts.steps,
            "engine_steps": counts.engine_steps,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "seconds": rollouts.seconds,
            "reward": sum(p.reward(r) for p, r in zip(repeated, rollouts.responses, strict=True)) / len(repeated),
        }
