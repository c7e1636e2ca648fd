"""Makes drafter.safetensors: a small draft model, distilled from the shipped policy.

    OMP_NUM_THREADS=1 python -m examples.tiny_rl.make_drafter                         # about five minutes
    python -m examples.tiny_rl.make_drafter --random --out random.safetensors         # untrained: no draft is right

It has two layers, the fewest that can look up a digit of the problem by its place. It learns the policy's probabilities
on the policy's own responses. vLLM drafts its most probable token, and accepts that with the policy's probability.
"""

import argparse
import random
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM

from examples.tiny_rl import policy
from examples.tiny_rl.task import problems

RESPONSES = 4096
TOGETHER = 512  # responses per batch of sampling
SCORED = 64  # responses per batch of the policy's probabilities
STEPS = 2000
BATCH = 16
PEAK_RATE = 4e-3
WARMUP = 60

Text = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


def samples(teacher: LlamaForCausalLM, count: int, seed: int) -> list[Text]:
    """Returns `count` random problems, each with one response of the teacher, sampled at temperature 1."""
    torch.manual_seed(seed)
    prompts = [problem.prompt for problem in problems(count, random.Random(seed))]
    found: list[Text] = []
    for first in range(0, count, TOGETHER):
        some = prompts[first : first + TOGETHER]
        found += zip(some, policy.respond(teacher, some), strict=True)
    return found


def distill(teacher: LlamaForCausalLM, texts: list[Text], steps: int, seed: int, console: Console) -> LlamaForCausalLM:
    """Returns a draft model trained on the teacher's probabilities for each next token, for `steps` batches."""
    torch.manual_seed(seed)
    drafter = policy.fresh(policy.DRAFTER)
    tokens, mask = policy.pack(*zip(*texts, strict=True))
    wanted = torch.cat([probabilities(teacher, some).half() for some in tokens.split(SCORED)])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=PEAK_RATE)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(step / WARMUP, 1.02 - step / steps)
        rows = torch.randint(len(tokens), (BATCH,))
        longest = int(mask[rows].any(0).nonzero().max()) + 1
        predicted, weight = drafter(tokens[rows, :longest]).logits.log_softmax(-1), mask[rows, :longest]
        loss = -((wanted[rows, :longest] * predicted).sum(-1) * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            console.print(f"step {step}: loss {loss.item():.3f}")
    return drafter


@torch.no_grad()  # type: ignore[untyped-decorator]
def probabilities(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Returns probabilities of every next token, float32[n, longest - 1, vocabulary]; `tokens` is int64[n, longest]."""
    logits: Tensor = model(tokens[:, :-1]).logits
    return logits.softmax(-1)


def acceptance(drafter: LlamaForCausalLM, teacher: LlamaForCausalLM, texts: list[Text]) -> float:
    """Returns the mean probability over the responses' tokens that the teacher accepts the drafter's best token."""
    tokens, mask = policy.pack(*zip(*texts, strict=True))
    best = probabilities(drafter, tokens).argmax(-1, keepdim=True)
    accepted = probabilities(teacher, tokens).gather(2, best)[..., 0]
    return float((accepted * mask).sum() / mask.sum())


def main() -> None:
    """Trains and writes the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the weights (default: the shipped file)")
    parser.add_argument("--random", action="store_true", help="write an untrained draft model; needs --out")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.random and arguments.out is None:
        parser.error("--random needs --out: it would overwrite the shipped draft model")
    out, console = arguments.out or policy.SHIPPED_DRAFTER, Console()
    torch.manual_seed(arguments.seed)
    if arguments.random:
        drafter = policy.fresh(policy.DRAFTER)
    else:
        teacher = policy.load()
        texts = samples(teacher, RESPONSES, arguments.seed)
        drafter = distill(teacher, texts, arguments.steps, arguments.seed, console)
        fresh = samples(teacher, 128, arguments.seed + 1)
        console.print(
            f"on new problems the policy accepts {acceptance(drafter, teacher, fresh):.3f} of its tokens; "
            f"of the policy's own best tokens, it accepts {acceptance(teacher, teacher, fresh):.3f}"
        )
    policy.save(drafter, out)
    console.print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters -> {out}")


if __name__ == "__main__":
    main()
