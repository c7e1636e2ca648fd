"""HistoSpec beside vLLM's own suffix decoding, in real vLLM, on the policies of a real RL run.

    python -m benchmarks.vllm.suffix                # needs vllm and arctic-inference; half an hour on two cores
    python -m benchmarks.vllm.suffix --quick        # proves that it runs; the figures mean nothing

The run of examples/tiny_rl is trained once, without drafts, and the policy of every epoch is kept. Then each method
rolls out every epoch on those weights: the same prompts, sampling and seeds, one engine for all epochs, so that each
has the history that it would have in the run. Every method and seed has a process of its own; methods take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are counted in the scheduler
os.environ.setdefault("HISTOSPEC_DEADLINE", "0.2")

DRAFTED = 16
COST = 0.05  # at which the speed-up S_c of a method is stated


def suffix(**options: float) -> dict[str, Any]:
    """vLLM's arguments for suffix decoding."""
    named = {f"suffix_decoding_{name}": value for name, value in options.items()}
    return {"speculative_config": {"method": "suffix", "num_speculative_tokens": DRAFTED, **named}}


METHODS: dict[str, tuple[dict[str, str], dict[str, Any] | None]] = {
    # name: environment, vLLM's arguments; None are HistoSpec's
    "HistoSpec": ({"HISTOSPEC_VERIFY_COST": str(COST)}, None),
    "HistoSpec, learned cost": ({"HISTOSPEC_VERIFY_COST": "auto"}, None),
    "suffix, defaults": ({}, suffix()),
    "suffix, probability 0.3": ({}, suffix(min_token_prob=0.3)),
    "suffix, factor 4": ({}, suffix(max_spec_factor=4.0)),
}


def main() -> None:
    """Runs the comparison, or a part of it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few problems, three epochs, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--part", nargs=3, metavar=("METHOD", "SEED", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        method, seed, folder = arguments.part
        options = {"seed": int(seed)} | (METHODS[method][1] or drafts())
        print(json.dumps(list(roll_out(Path(folder), settings(arguments.quick), options))))
        return
    result = compare(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


def settings(quick: bool) -> Any:
    """The size of the run."""
    from examples.tiny_rl import loop

    return replace(loop.Settings(), epochs=3, problems=8) if quick else loop.Settings()


def problems(size: Any) -> list[Any]:
    """The problems of the run."""
    from examples.tiny_rl import task

    return task.problems(size.problems, Random(size.seed))


def prompts(size: Any) -> list[list[int]]:
    """Their prompts."""
    return [problem.prompt for problem in problems(size)]


def drafts() -> dict[str, Any]:
    """vLLM's arguments for HistoSpec."""
    from examples.tiny_rl.rollout import DRAFTS

    return DRAFTS


def train(
    folder: Path, size: Any, model: Any = None, options: dict[str, Any] | None = None, minibatches: int = 4
) -> None:
    """Trains a policy on rollouts without drafts; `folder/N` takes the policy that epoch N rolls out.

    Args:
        folder: where the policies go.
        size: see `settings`.
        model: the policy of epoch 1, in place of the demo's.
        options: arguments of vLLM for it.
        minibatches: updates a pass; more of them need less memory.
    """
    import torch

    from examples.tiny_rl import grpo, policy
    from examples.tiny_rl.rollout import RolloutEngine

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


def roll_out(folder: Path, size: Any, options: dict[str, Any]) -> Iterator[dict[str, float]]:
    """All epochs on the policies of `train`, with vLLM's arguments `options`; yields the counts of each."""
    from transformers import LlamaForCausalLM

    from examples.tiny_rl.rollout import RolloutEngine
    from histospec.client.vllm import cpu

    cpu.install()  # vLLM's CPU build rejects at random without, whatever drafts (see client/vllm/cpu.py)
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


def compare(arguments: argparse.Namespace) -> Any:
    """The table of methods; medians over the seeds."""
    from examples import draft_server

    seeds = 1 if arguments.quick else arguments.seeds
    results: dict[str, list[list[dict[str, float]]]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        train(folder, settings(arguments.quick))
        server = stack.enter_context(draft_server.running(folder / "store", folder / "server.log"))
        for seed in range(1, seeds + 1):
            for method, (environment, _) in METHODS.items():
                namespace = f"{method} {seed}"
                settled = {"HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": namespace} | environment
                command = [sys.executable, "-m", "benchmarks.vllm.suffix", "--part", method, str(seed), name]
                command += ["--quick"] if arguments.quick else []
                done = subprocess.run(command, env=os.environ | settled, stdout=subprocess.PIPE, text=True, check=True)
                results[method].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"seed {seed}, {method}: {summary(results[method][-1])}", file=sys.stderr)
    print(f"\n| method | tokens a step, epochs 2+ | drafted a step | accepted | S_{COST} | seconds |")
    print("|---|---|---|---|---|---|")
    for method, runs in results.items():
        each = [summary(run) for run in runs]
        row = {key: statistics.median(run[key] for run in each) for key in each[0]}
        print(
            f"| {method} | {row['tokens_a_step']:.2f} | {row['drafted_a_step']:.2f} | {row['accepted']:.0%} "
            f"| {row['speed_up']:.2f} | {row['seconds']:.1f} |"
        )
    return results


def summary(epochs: list[dict[str, float]]) -> dict[str, float]:
    """What epochs 2 and later come to."""
    total = {key: sum(epoch[key] for epoch in epochs[1:]) for key in epochs[0]}
    return {
        "tokens_a_step": total["tokens"] / total["steps"],
        "drafted_a_step": total["drafted"] / total["steps"],
        "accepted": total["accepted"] / max(total["drafted"], 1),
        "speed_up": total["tokens"] / (total["steps"] + COST * total["drafted"]),
        "seconds": total["seconds"],
    }


if __name__ == "__main__":
    main()
