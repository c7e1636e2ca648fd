"""Records rollouts of the demo's policies: `python -m benchmarks.asynchronous.record FOLDER`.

Trains the policy as `examples/tiny_rl` does, with transformers in place of vLLM. Before each update it records the
responses at temperature 1, which train the policy, and one response per problem at temperature 0. FOLDER then has two
files for `benchmarks.asynchronous.places` and `histospec replay`. It takes minutes.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

from examples.tiny_rl import grpo, policy
from examples.tiny_rl.loop import Settings
from examples.tiny_rl.task import problems


def write(file: TextIO, epoch: int, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> None:
    """Appends the responses of an epoch, one per prompt."""
    for prompt, tokens in zip(prompts, responses, strict=True):
        file.write(json.dumps({"prompt": prompt, "epoch": epoch, "group": epoch, "tokens": tokens}) + "\n")


def record(settings: Settings, folder: Path) -> None:
    """Trains the policy, and writes its responses to two files in `folder`."""
    torch.manual_seed(settings.seed)
    train_set = problems(settings.problems, random.Random(settings.seed))
    prompts = [problem.prompt for problem in train_set]
    repeated = [prompt for prompt in prompts for _ in range(settings.samples)]
    model = policy.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    with (folder / "demo-1.jsonl").open("w") as sampled, (folder / "demo-0.jsonl").open("w") as greedy:
        for epoch in range(1, settings.epochs + 1):
            responses = policy.respond(model, repeated)
            write(sampled, epoch, repeated, responses)
            write(greedy, epoch, prompts, policy.respond(model, prompts, sample=False))
            groups = [responses[i : i + settings.samples] for i in range(0, len(responses), settings.samples)]
            rewards = [[p.reward(response) for response in group] for p, group in zip(train_set, groups, strict=True)]
            print(f"epoch {epoch}: reward {torch.tensor(rewards).mean():.3f}", flush=True)
            grpo.update(model, optimizer, repeated, responses, torch.tensor(rewards))


def main() -> None:
    """Records the demo's policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    record(Settings(epochs=arguments.epochs), arguments.folder)


if __name__ == "__main__":
    main()
