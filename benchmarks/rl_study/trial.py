"""One RL run with one method. Writes the results and costs of each epoch as a line of JSON.

    python -m benchmarks.rl_study.trial METHOD SEED FILE

The run is that of examples/tiny_rl: GRPO on the same problems every epoch, sampled at temperature 1. Problems, sampling
and the order of training follow from the seed, so that methods of one seed start alike.

Time is CPU time of this process, which works in one thread, so other programs on the machine change it little.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random

os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # for ngram, which would otherwise give torch one thread per core
os.environ.setdefault("HISTOSPEC_DEADLINE", "1")  # seconds: a busy machine must not change the counts
os.environ.setdefault("HISTOSPEC_VERIFY_COST", "0.05")

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
import torch

from benchmarks.rl_study.methods import FROM_TWIN, METHODS, SIZES, Method
from benchmarks.rl_study.overlap import common_prefix, rouge_1
from examples.tiny_rl import grpo, policy, task
from examples.tiny_rl.rollout import DRAFTS, Counts, RolloutEngine, draft_model, responding
from histospec.client import DraftClient
from histospec.client.rollouts import SpeculativeRollout
from histospec.client.vllm.patches import cpu

HELD_OUT_SEED = 1_000_000  # added to the seed for held-out problems


@dataclass(frozen=True)
class Size:
    """The size of a run."""

    epochs: int = 12
    problems: int = 24
    samples: int = 8
    """Responses per problem."""
    concurrency: int = 64
    """Requests that vLLM runs concurrently."""
    rate: float = 1e-4
    """Learning rate."""
    held_out: int = 128
    """How many other problems the final policy answers, once each."""


QUICK = Size(epochs=3, problems=4, samples=4, held_out=8)


@dataclass
class Seconds:
    """The time of an epoch, by part."""

    verification: float = 0.0
    """Scoring old responses."""
    rollout: float = 0.0
    """Generating."""
    assembly: float = 0.0
    """Deciding which tokens to keep, and assembling responses."""
    update: float = 0.0
    """Training, and loading the new weights into vLLM."""
    other: float = 0.0
    """Fetching the old responses, storing the new ones, rewards."""


@dataclass
class Sampled:
    """The responses of an epoch."""

    responses: list[list[int]]
    reused: int
    """Tokens reused from old responses."""
    counts: Counts
    """Counts of the steps that generated; scoring is not included."""
    seconds: Seconds = field(default_factory=Seconds)


def sample(
    engine: RolloutEngine, rollout: SpeculativeRollout | None, prompts: list[list[int]], each: int, epoch: int
) -> Sampled:
    """Samples `each` responses per prompt; the responses of a prompt are consecutive."""
    before, start, clock = engine.counts, time.process_time(), time.perf_counter()
    if rollout is None:
        done = engine.generate(prompts, each, epoch)
        return Sampled(done.responses, 0, done.counts, Seconds(rollout=time.process_time() - start))
    rollouts = rollout.generate(prompts, responding(epoch, n=each), epoch=epoch, use_tqdm=False)
    took, passed, report = time.process_time() - start, time.perf_counter() - clock, rollout.report
    assert report is not None  # it has generated
    parts = (report.seconds_scoring, report.seconds_generating, report.seconds_assembling)
    verification, generation, assembly = (took * part / passed for part in parts)
    seconds = Seconds(verification, generation, assembly, other=took * (1 - sum(parts) / passed))
    scored = Counts(steps=report.tried)  # each scored response is a request that samples one token
    return Sampled(
        [done.tokens.tolist() for done in rollouts],
        sum(done.reused for done in rollouts),
        engine.counts - before - scored,
        seconds,
    )


def run(method: Method, seed: int, size: Size) -> Iterator[dict[str, object]]:
    """Yields the record of each epoch when it ends, then the reward on held-out problems."""
    cpu.install()  # without it, vLLM's CPU build rejects drafts at random (see client/vllm/patches/cpu.py)
    torch.manual_seed(seed)
    problems = task.problems(size.problems, Random(seed))
    held_out = task.problems(size.held_out, Random(HELD_OUT_SEED + seed))
    prompts = [problem.prompt for problem in problems]
    repeated = [problem for problem in problems for _ in range(size.samples)]
    model = policy.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.0)
    options = dict(DRAFTS if method.drafts else method.options)
    os.environ |= method.environment
    if method.refresh is not None:
        os.environ |= {"HISTOSPEC_SAMPLING": "coupled", "HISTOSPEC_SEED_REFRESH": str(method.refresh)}
        options["speculative_config"] = {**options["speculative_config"], "num_speculative_tokens": FROM_TWIN}
    old: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model.save_pretrained(folder)
        if method.drafter is not None:
            drafter = Path(folder) / "drafter"
            policy.load(policy.SHIPPED_DRAFTER, policy.DRAFTER).save_pretrained(drafter)
            options |= draft_model(drafter, method.drafter)
        engine = RolloutEngine(Path(folder), size.concurrency, {"seed": seed, **options})
        engine.warm_up()
        rollout = None
        if method.lenience is not None:  # SPEC-RL keeps its responses in the history
            client = stack.enter_context(DraftClient())
            rollout = SpeculativeRollout(engine.llm, client, lenience=method.lenience, seed=seed)
        for epoch in range(1, size.epochs + 1):
            done = sample(engine, rollout, prompts, size.samples, epoch)
            start = time.process_time()
            rewards = [p.reward(response) for p, response in zip(repeated, done.responses, strict=True)]
            table = torch.tensor(rewards).view(size.problems, size.samples)
            trained = time.process_time()
            grpo.update(model, optimizer, [p.prompt for p in repeated], done.responses, table)
            engine.push(model)
            done.seconds.other += trained - start
            done.seconds.update = time.process_time() - trained
            pairs = list(zip(done.responses, old, strict=False))
            tokens = sum(map(len, done.responses))
            yield {
                "epoch": epoch,
                "reward": table.mean().item(),
                "tokens": tokens,
                "generated": tokens - done.reused,
                "reused": done.reused,
                **asdict(done.counts),
                "rouge_1": sum(rouge_1(*pair) for pair in pairs) / len(pairs) if pairs else None,
                "share_reused": done.reused / tokens,
                "prefix": sum(shared_prefixes(done.responses, old, size.samples)) / tokens if old else None,
                "alike": sum(alike(done.responses, size.samples)) / len(repeated),
                "distinct": len(set(map(tuple, done.responses))) / len(repeated),
                "seconds": asdict(done.seconds),
            }
            old = done.responses
        answers = engine.generate([p.prompt for p in held_out], 1, None).responses
        right = [p.reward(response) for p, response in zip(held_out, answers, strict=True)]
        yield {"held_out": sum(right) / len(right)}


def shared_prefixes(new: list[list[int]], old: list[list[int]], samples: int) -> Iterator[int]:
    """Yields the longest common prefix of each response with the problem's last responses, `samples` per problem."""
    for i, response in enumerate(new):
        first = i // samples * samples
        yield max(common_prefix(response, other) for other in old[first : first + samples])


def alike(responses: list[list[int]], samples: int) -> Iterator[float]:
    """Yields ROUGE-1 of each response with the next one of its group, `samples` per problem."""
    for i, response in enumerate(responses):
        following = i + 1 if (i + 1) % samples else i + 1 - samples
        yield rouge_1(response, responses[following])


def main() -> None:
    """Writes one line per epoch, and one at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("seed", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: that of Size")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    given = {name: value for name in SIZES if (value := getattr(arguments, name)) is not None}
    with arguments.file.open("w") as file:
        for record in run(METHODS[arguments.method], arguments.seed, replace(size, **given)):
            print(json.dumps(rounded(record)), file=file, flush=True)


def rounded(value: object) -> object:
    """Returns the value with its numbers rounded to 5 decimal places."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
