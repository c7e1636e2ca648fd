"""Makes weights.safetensors: supervised training on worked solutions of random problems, some with slips.

    OMP_NUM_THREADS=1 python -m examples.tiny_rl.make_weights        # about ten minutes

The teacher sometimes forgets a carry or a borrow, and so does the policy that imitates it. RL then rewards the right
answers, and the policy learns to make fewer of these slips.
"""

import argparse
import random
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from examples.tiny_rl import policy
from examples.tiny_rl.task import Problem, problems, worked_solution

STEPS = 700
BATCH = 32
PEAK_RATE = 2e-3
WARMUP = 60
SLIPS = 0.3


def accuracy(model: LlamaForCausalLM, batch: list[Problem]) -> float:
    """Returns the mean reward over problems, with one response each, sampled at temperature 1."""
    responses = policy.respond(model, [problem.prompt for problem in batch])
    return sum(p.reward(response) for p, response in zip(batch, responses, strict=True)) / len(batch)


def train(
    steps: int,
    seed: int,
    console: Console,
    *,
    size: policy.Size = policy.SMALL,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    rate: float = PEAK_RATE,
) -> LlamaForCausalLM:
    """Trains a policy on `steps` batches of fresh problems. Prints its loss and reward every hundred steps.

    `rate` is the highest learning rate; policies much larger than the shipped one need a lower one.
    """
    torch.manual_seed(seed)
    rng, model = random.Random(seed), policy.fresh(size, device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    held_out = problems(128, random.Random(seed + 1))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / WARMUP, 1.02 - step / steps)
        batch = problems(BATCH, rng)
        tokens, mask = policy.pack([p.prompt for p in batch], [worked_solution(p, rng, SLIPS) for p in batch])
        tokens, mask = tokens.to(device), mask.to(device)
        loss = -(policy.logprobs(model, tokens) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            console.print(f"step {step}: loss {loss.item():.3f}, reward {accuracy(model, held_out):.2f}")
    return model


def main() -> None:
    """Trains and writes the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=policy.SHIPPED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    model = train(arguments.steps, arguments.seed, console)
    policy.save(model, arguments.out)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters -> {arguments.out}")


if __name__ == "__main__":
    main()
