"""The update: group-relative advantages and a clipped policy gradient (GRPO without a KL term)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from examples.tiny_rl import policy

CLIP = 0.2
LARGEST_GRADIENT = 1.0
TOGETHER = 8  # samples per forward pass


def advantages(rewards: Tensor) -> Tensor:
    """Returns how much better each sample did than the others of its group; float32[problems, samples] as `rewards`."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def update(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: Tensor,
    *,
    passes: int = 2,
    minibatches: int = 4,
) -> None:
    """Improves `model` on the rollouts of one epoch.

    `prompts` and `responses` have one row per sample; the samples of a group are consecutive. `rewards` is
    float32[problems, samples], on the CPU, wherever `model` is. A group whose samples all did equally well teaches
    nothing and is left out.
    """
    advantage = advantages(rewards).flatten()
    useful = (rewards.std(1) > 0).repeat_interleave(rewards.shape[1]).nonzero().flatten()
    if not len(useful):
        return
    tokens, mask = policy.pack([prompts[i] for i in useful], [responses[i] for i in useful])
    lengths = torch.tensor([len(prompts[i]) + len(responses[i]) for i in useful])
    tokens, mask, advantage = (each.to(model.device) for each in (tokens, mask, advantage[useful]))
    old = torch.zeros_like(mask)
    with torch.no_grad():
        for rows, longest in alike(torch.arange(len(useful)), lengths):
            old[rows, : longest - 1] = policy.logprobs(model, tokens[rows, :longest])
    for _ in range(passes):
        for minibatch in torch.randperm(len(useful)).chunk(minibatches):
            optimizer.zero_grad()
            for rows, longest in alike(minibatch, lengths):
                ratio = (policy.logprobs(model, tokens[rows, :longest]) - old[rows, : longest - 1]).exp()
                weighted = advantage[rows, None]
                gain = torch.min(ratio * weighted, ratio.clamp(1 - CLIP, 1 + CLIP) * weighted)
                loss = -(gain * mask[rows, : longest - 1]).sum() / mask[minibatch].sum()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()


def alike(rows: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yields groups of rows of similar lengths, which need little padding, with the longest length of each group."""
    for some in rows[lengths[rows].argsort()].split(TOGETHER):
        yield some, int(lengths[some].max())
