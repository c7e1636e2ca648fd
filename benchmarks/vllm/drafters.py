"""Compares history, a drafter of the model's own, and both, in real vLLM on the policies of a real RL run.

    python -m benchmarks.vllm.drafters --seeds 5        # needs vllm; about six minutes per seed on two cores
    python -m benchmarks.vllm.drafters --quick          # to check that it runs; the figures mean nothing

The run of examples/tiny_rl is trained once per seed, without drafts, and the policy of every epoch is kept. Every seed
has a process of its own, with one engine per way. They take turns: each generates a third of an epoch, with the same
weights and prompts. The order changes from turn to turn. An engine has a namespace of its own, with the history of its
run. CPU time is that of the process, without the draft server.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
from benchmarks.process import printed
from benchmarks.tables import table

AUTO = {"HISTOSPEC_VERIFY_COST": "auto", "HISTOSPEC_MODEL_DRAFT_TOKENS": "auto"}
SHIPPED, RANDOM = "shipped", "random"
PLAIN = "none"

WAYS: dict[str, tuple[dict[str, str], str | None, int | None]] = {
    # name: environment of HistoSpec's adapter, draft model, its tokens if vLLM drafts without HistoSpec
    PLAIN: ({}, None, 0),
    "history": (AUTO, None, None),
    "drafter": ({}, SHIPPED, 3),
    "both": (AUTO, SHIPPED, None),
    "both, 3 tokens": ({"HISTOSPEC_VERIFY_COST": "0.05", "HISTOSPEC_MODEL_DRAFT_TOKENS": "3"}, SHIPPED, None),
    "both, random drafter": (AUTO, RANDOM, None),
}
TURNS = 3  # of an epoch

Counts = dict[str, float]


def main() -> None:
    """Prints the tables, or runs one seed in a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few problems, two epochs, one seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8, help="requests side by side")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="names of ways, or drafter:N")
    parser.add_argument("--policies", type=Path, help="folder that keeps the policies for the next run")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--part", nargs=2, metavar=("SEED", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.epochs = 1, 2
    if arguments.part:
        seed, folder = arguments.part
        print(json.dumps(part(int(seed), Path(folder), arguments)))
        return
    words = ["--epochs", str(arguments.epochs), "--batch", str(arguments.batch), "--ways", *arguments.ways]
    words += ["--quick"] if arguments.quick else []
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(arguments.seeds):
            folder = (arguments.policies or Path(scratch)) / str(seed)
            results.append(printed("benchmarks.vllm.drafters", "--part", str(seed), str(folder), *words))
            print(f"seed {seed}\n{tables(results[-1:], arguments.ways)}", file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(tables(results, arguments.ways), end="")


def part(seed: int, folder: Path, arguments: argparse.Namespace) -> dict[str, list[Counts]]:
    """Returns the counts of each way in each epoch, with the problems of a seed."""
    from transformers import LlamaForCausalLM

    from benchmarks.vllm import epochs
    from examples.draft_server import running
    from examples.tiny_rl import policy
    from examples.tiny_rl.rollout import RolloutEngine
    from histospec.client.vllm.patches import cpu

    size = replace(epochs.settings(arguments.quick), epochs=arguments.epochs, seed=seed, concurrency=arguments.batch)
    if not (folder / str(size.epochs)).exists():
        epochs.train(folder, size)
    policy.load(policy.SHIPPED_DRAFTER, policy.DRAFTER).save_pretrained(folder / SHIPPED)
    policy.fresh(policy.DRAFTER).save_pretrained(folder / RANDOM)
    cpu.install()
    prompts = epochs.prompts(size)
    figures: dict[str, list[Counts]] = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory() as name, running(Path(name, "store"), Path(name, "server.log")) as server:
        os.environ["HISTOSPEC_ENDPOINT"] = server.endpoint
        engines: dict[str, RolloutEngine] = {}
        for way in arguments.ways:
            environment, options = way_of(way, folder)
            os.environ.update(environment, HISTOSPEC_NAMESPACE=way)
            engines[way] = RolloutEngine(folder / "1", size.concurrency, options)
            engines[way].warm_up()
        turn = 0
        for epoch in range(1, size.epochs + 1):
            model = LlamaForCausalLM.from_pretrained(folder / str(epoch))
            for engine in engines.values():
                engine.push(model)
            sums = {way: dict.fromkeys(("tokens", "steps", "cpu", "drafted"), 0.0) for way in engines}
            for start in range(0, len(prompts), len(prompts) // TURNS):
                turn += 1
                order = list(engines)[turn % len(engines) :] + list(engines)[: turn % len(engines)]
                for way in order:
                    done = engines[way].generate(prompts[start : start + len(prompts) // TURNS], size.samples, epoch)
                    add(sums[way], done.tokens, done.counts.steps, done.cpu_seconds, done.counts.drafted)
            for way, counts in sums.items():
                figures[way].append(counts)
    return figures


def add(sums: Counts, *more: float) -> None:
    """Adds the counts of a turn, in the order of the keys."""
    for key, value in zip(sums, more, strict=True):
        sums[key] += value


def way_of(way: str, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the environment of an engine, and vLLM's arguments."""
    from examples.tiny_rl.rollout import DRAFTED, DRAFTS, draft_model

    name, _, tokens = way.partition(":")
    environment, drafter, alone = WAYS[name]
    if tokens:
        alone, environment = (int(tokens), environment) if alone else (None, environment | fixed(tokens))
    if alone == 0:
        return environment, {}
    if drafter is None:
        return environment, DRAFTS
    own = draft_model(folder / drafter, alone or DRAFTED)
    return environment, own if alone else DRAFTS | own


def fixed(tokens: str) -> dict[str, str]:
    """Returns the environment with which the drafter always makes this many tokens."""
    return {"HISTOSPEC_MODEL_DRAFT_TOKENS": tokens}


def tables(results: Sequence[Mapping[str, Sequence[Counts]]], ways: Sequence[str]) -> str:
    """Returns tokens per step, and CPU time per token relative to the first way, by epoch: means over the seeds."""
    count = len(results[0][ways[0]])

    def row(name: str, figure: Any) -> list[str]:
        values = [statistics.mean(figure(run, epoch) for run in results) for epoch in range(count)]
        return [name, *(f"{value:.3f}" for value in values), f"{statistics.mean(values[1:]):.3f}"]

    head = ["", *map(str, range(1, count + 1)), f"2 to {count}"]
    steps = (row(way, lambda run, i, way=way: run[way][i]["tokens"] / run[way][i]["steps"]) for way in ways)
    cost = (row(way, lambda run, i, way=way: cpu(run[way][i]) / cpu(run[ways[0]][i])) for way in ways)
    micros = (row(way, lambda run, i, way=way: 1e6 * cpu(run[way][i])) for way in ways)
    return "\n".join(
        table([title, *head[1:]], rows)
        for title, rows in (("tokens per step", steps), (f"CPU per token / {ways[0]}", cost), ("us", micros))
    )


def cpu(counts: Counts) -> float:
    """CPU seconds per token."""
    return counts["cpu"] / counts["tokens"]


if __name__ == "__main__":
    main()
