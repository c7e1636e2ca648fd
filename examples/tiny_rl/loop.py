"""The RL run: every epoch is rolled out with and without drafts on the same weights; the drafted rollouts train."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.draft_server import Drafts, DraftServer
from examples.tiny_rl import grpo, policy
from examples.tiny_rl.results import Epoch, Side
from examples.tiny_rl.rollout import DRAFTED, DRAFTS, RolloutEngine, Rollouts, draft_model
from examples.tiny_rl.table import Progress
from examples.tiny_rl.task import Problem, problems


@dataclass(frozen=True)
class Settings:
    """The size of the run."""

    epochs: int = 7
    problems: int = 24
    """How many problems; every epoch has the same ones."""
    samples: int = 8
    """Responses per problem."""
    concurrency: int = 8
    """Requests that vLLM runs concurrently. With more of them, drafted tokens cost a CPU more than the steps that they
    save. A GPU reaches this point with hundreds of requests."""
    rate: float = 1e-4
    """Learning rate."""
    seed: int = 0
    drafter: Path | None = None
    """Weights of a draft model that drafts, too; None: only the server drafts."""


def run(settings: Settings, server: DraftServer, namespace: str, folder: Path, progress: Progress) -> Iterator[Epoch]:
    """Yields each epoch when it ends. Saves the models in `folder`, in the format that vLLM loads."""
    torch.manual_seed(settings.seed)
    train_set = problems(settings.problems, random.Random(settings.seed))
    prompts = [problem.prompt for problem in train_set]
    model = policy.load()
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)

    progress.doing("starting vLLM, once with and once without drafts")
    plain = RolloutEngine(folder, settings.concurrency, {})
    options = DRAFTS
    if settings.drafter is not None:
        policy.load(settings.drafter, policy.DRAFTER).save_pretrained(folder / "drafter")
        options = DRAFTS | draft_model(folder / "drafter", DRAFTED)
    drafting = RolloutEngine(folder, settings.concurrency, options)
    for engine in (plain, drafting):
        engine.warm_up()

    for number in range(1, settings.epochs + 1):
        before, drafts_before = server.lookups(namespace), server.drafts(namespace)
        progress.doing(f"epoch {number}: rolling out without drafts")
        without = plain.generate(prompts, settings.samples, number)
        progress.doing(f"epoch {number}: rolling out with drafts")
        with_drafts = drafting.generate(prompts, settings.samples, number)
        lookups = server.lookups(namespace) - before
        history = None if settings.drafter is None else server.drafts(namespace) - drafts_before

        scored = _scored(train_set, settings.samples, with_drafts, history)
        start = time.perf_counter()
        if number < settings.epochs:
            progress.doing(f"epoch {number}: learning from the rollouts with drafts")
            repeated = [prompt for prompt in prompts for _ in range(settings.samples)]
            grpo.update(model, optimizer, repeated, with_drafts.responses, torch.tensor(scored.rewards))
            for engine in (plain, drafting):
                engine.push(model)
        yield Epoch(
            number,
            with_drafts=scored,
            without=_scored(train_set, settings.samples, without),
            lookups=lookups,
            train_seconds=time.perf_counter() - start,
        )


def _scored(train_set: list[Problem], samples: int, rollouts: Rollouts, history: Drafts | None = None) -> Side:
    groups = [rollouts.responses[i : i + samples] for i in range(0, len(rollouts.responses), samples)]
    rewards = [[p.reward(response) for response in group] for p, group in zip(train_set, groups, strict=True)]
    counts = rollouts.counts
    return Side(
        rewards=rewards,
        tokens=rollouts.tokens,
        request_steps=counts.steps,
        engine_steps=counts.engine_steps,
        drafted=counts.drafted,
        accepted=counts.accepted,
        seconds=rollouts.seconds,
        cpu_seconds=rollouts.cpu_seconds,
        history=history,
    )
