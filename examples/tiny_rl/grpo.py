"""The update: group-relative advantages and a clipped policy gradient (GRPO without a KL term)."""

import policy
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CLIP = 0.2
LARGEST_GRADIENT = 1.0


def advantages(rewards: Tensor) -> Tensor:
    """float32[problems, samples] -> the same shape: how much better a sample did than the others of its group."""
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

    `prompts` and `responses` are one row a sample, those of a group side by side; `rewards` is
    float32[problems, samples], on the CPU wherever `model` is. A group whose samples all did equally well teaches
    nothing and is left out.
    """
    advantage = advantages(rewards).flatten()
    useful = (rewards.std(1) > 0).repeat_interleave(rewards.shape[1]).nonzero().flatten()
    if not len(useful):
        return
    tokens, mask = policy.pack([prompts[i] for i in useful], [responses[i] for i in useful])
    tokens, mask, advantage = (each.to(model.device) for each in (tokens, mask, advantage[useful]))
    with torch.no_grad():
        old = torch.cat([policy.logprobs(model, rows) for rows in tokens.split(64)])
    for _ in range(passes):
        for rows in torch.randperm(len(useful)).chunk(minibatches):
            ratio = (policy.logprobs(model, tokens[rows]) - old[rows]).exp()
            weighted = advantage[rows, None]
            gain = torch.min(ratio * weighted, ratio.clamp(1 - CLIP, 1 + CLIP) * weighted)
            loss = -(gain * mask[rows]).sum() / mask[rows].sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
