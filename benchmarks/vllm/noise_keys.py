"""Compares keys for the noise of coupled sampling: the position, or the last k tokens.

    python -m benchmarks.vllm.noise_keys --seeds 2

It makes the RL run of examples/tiny_rl, sampled in torch. In each epoch the same policy answers every prompt with each
kind of noise and the seeds of the epoch before. The engine drafts for each kind from its responses of the last epoch.
All kinds thereby have the same policies, and differ only in the repetition. The policy trains on independent draws.

Noise of the last k tokens is a function of their hash and of how often they occurred before in this response, so that
repeated text does not repeat its noise. It should survive insertions, which noise of the position does not.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from random import Random

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.rl_study.overlap import common_prefix
from benchmarks.tables import table
from examples.tiny_rl import grpo, policy, task
from histospec.client.vllm.coupled import noise
from histospec.native import Engine

PROBLEMS, SAMPLES, EPOCHS, RATE = 24, 8, 6, 1e-4
VERIFY_COST, LONGEST_DRAFT = 0.05, 64
Key = Callable[[list[int], Counter[bytes]], int]


def by_position(response: list[int], seen: Counter[bytes]) -> int:
    """Returns the position, as a key of the noise."""
    return len(response)


def by_last(k: int) -> Key:
    """Returns a function whose key of the noise is the last k tokens and how often they occurred before."""

    def key(response: list[int], seen: Counter[bytes]) -> int:
        last = np.asarray([len(response[-k:]), *response[-k:]], "<i4").tobytes()
        seen[last] += 1
        digest = blake2b(last, digest_size=8, salt=seen[last].to_bytes(8, "little")).digest()
        return int.from_bytes(digest, "little", signed=True)

    return key


KINDS: dict[str, Key] = {"position": by_position, **{f"last {k}": by_last(k) for k in (1, 2, 3, 4, 8)}}


@torch.no_grad()  # type: ignore[untyped-decorator]
def sample(model: LlamaForCausalLM, prompts: list[list[int]], seeds: torch.Tensor, key: Key) -> list[list[int]]:
    """Returns one response per prompt, in which each token is the argmax with its noise."""
    responses: list[list[int]] = [[] for _ in prompts]
    seen: list[Counter[bytes]] = [Counter() for _ in prompts]
    running, cache = list(range(len(prompts))), None
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), task.END_ID)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for _ in range(task.LONGEST):
        out = model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        keys = torch.tensor([key(responses[i], seen[i]) for i in range(len(prompts))])
        rows = torch.arange(len(prompts))
        chosen = noise.choose(out.logits[:, -1].float(), rows, seeds, keys, torch.zeros_like(rows))
        for i in running:
            responses[i].append(int(chosen[i]))
        running = [i for i in running if responses[i][-1] != task.END_ID]
        if not running:
            break
        tokens, places = chosen[:, None], places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.int64)], 1)
    return responses


class Drafter:
    """The engine with the responses of one kind of noise."""

    def __init__(self, named: bool) -> None:
        """`named`: whether sessions give their seeds; without them there are no twins."""
        self.engine, self.named = Engine(memory_bytes=1 << 28), named

    def steps(self, prompts: list[list[int]], responses: list[list[int]], seeds: list[int], epoch: int) -> int:
        """Returns how many steps these responses take, and adds them to the history."""
        sessions = [
            self.engine.open("run", prompt, seed=seed if self.named else None)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        at, steps = [0] * len(prompts), 0
        drafts: list[list[int]] = [[] for _ in prompts]
        while running := [i for i in range(len(prompts)) if at[i] < len(responses[i])]:
            new = []
            for i in running:
                right = 0
                while right < len(drafts[i]) and responses[i][at[i] + right : at[i] + right + 1] == [drafts[i][right]]:
                    right += 1
                new.append(responses[i][at[i] : at[i] + right + 1])
                at[i] += len(new[-1])
                steps += 1
            offsets = np.cumsum([0, *map(len, new)])
            flat = np.concatenate([np.asarray(each, np.int32) for each in new])
            drafted, ends, _ = self.engine.step(
                np.asarray([sessions[i] for i in running]), flat, offsets,
                max_tokens=LONGEST_DRAFT, verify_cost=VERIFY_COST,
            )  # fmt: skip
            for row, i in enumerate(running):
                drafts[i] = drafted[ends[row] : ends[row + 1]].tolist()
        for session in sessions:
            self.engine.close(session, epoch=epoch)
        self.engine.wait_until_built()
        return steps


def main() -> None:
    """Prints one row per kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Key] = {"independent": by_position, **KINDS}
    tokens, steps, prefix = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(1, arguments.seeds + 1):
        torch.manual_seed(seed)
        problems = task.problems(PROBLEMS, Random(seed))
        repeated = [problem for problem in problems for _ in range(SAMPLES)]
        prompts = [problem.prompt for problem in repeated]
        model = policy.load()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        drafters = {name: Drafter(named=name != "independent") for name in kinds}
        old: dict[str, list[list[int]]] = {}
        for epoch in range(EPOCHS):
            for name, key in kinds.items():
                kept = torch.arange(len(prompts)) + seed * 10**6
                fresh = kept + (epoch + 1) * 10**9
                seeds = fresh if name == "independent" else kept
                responses = sample(model, prompts, seeds, key)
                taken = drafters[name].steps(prompts, responses, seeds.tolist(), epoch)
                if name in old:
                    steps[name] += taken
                    tokens[name] += sum(map(len, responses))
                    pairs = zip(responses, old[name], strict=True)
                    prefix[name] += sum(common_prefix(*pair) for pair in pairs)
                old[name] = responses
            rewards = [p.reward(r) for p, r in zip(repeated, old["independent"], strict=True)]
            by_group = torch.tensor(rewards).view(PROBLEMS, SAMPLES)
            grpo.update(model, optimizer, prompts, old["independent"], by_group)
    rows = [[name, f"{tokens[name] / steps[name]:.2f}", f"{prefix[name] / tokens[name]:.2f}"] for name in kinds]
    print(table(["noise of", "tokens a step", "prefix of the last response"], rows), end="")


if __name__ == "__main__":
    main()
