"""Compares history, a drafter of the model's own, and both, in real vLLM on the policies of a real RL run.

    python -m benchmarks.vllm.drafters --seeds 5        # needs vllm; about six minutes per seed on two cores
    python -m benchmarks.vllm.drafters --quick          # to check that it runs; the figures mean nothing

The run of examples/tiny_rl is trained once per seed, without drafts, and the policy of every epoch is kept. Every seed
has a process of its own, with one engine per way. They take turns: each generates a third of an epoch, with the same
weights and prompts. The order changes from turn to turn. An engine has a namespace of its own, with the history of its
run. CPU time is that of the process, without the draft server, relative to the first way. The table has means over the
seeds and their standard deviations.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Prints the table, or runs one seed in a child process."""
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
            print(f"seed {seed}\n{results_table(results[-1:], arguments.ways)}", file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(results_table(results, arguments.ways), end="")


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
            sums = {way: dict.fromkeys(("tokens", "steps", "cpu"), 0.0) for way in engines}
            for start in range(0, len(prompts), len(prompts) // TURNS):
                turn += 1
                order = list(engines)[turn % len(engines) :] + list(engines)[: turn % len(engines)]
                for way in order:
                    done = engines[way].generate(prompts[start : start + len(prompts) // TURNS], size.samples, epoch)
                    add(sums[way], done.tokens, done.counts.steps, done.cpu_seconds)
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
    if tokens and alone:
        alone = int(tokens)
    elif tokens:
        environment = environment | {"HISTOSPEC_MODEL_DRAFT_TOKENS": tokens}
    if alone == 0:
        return environment, {}
    if drafter is None:
        return environment, DRAFTS
    own = draft_model(folder / drafter, alone or DRAFTED)
    return environment, own if alone else DRAFTS | own


def results_table(results: Sequence[Mapping[str, Sequence[Counts]]], ways: Sequence[str]) -> str:
    """Returns tokens per step, and CPU time per token relative to the first way: in epoch 1, epoch 2, from then on."""
    last = len(results[0][ways[0]])
    spans = {"epoch 1": range(1), "epoch 2": range(1, 2), f"epochs 2 to {last}": range(1, last)}

    def cells(way: str, figure: Callable[[Counts, Counts], float]) -> Iterator[str]:
        for span in spans.values():
            values = [statistics.mean(figure(run[way][i], run[ways[0]][i]) for i in span) for run in results]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            yield f"{statistics.mean(values):.3f}{spread}"

    head = ["drafts", *(f"{what}, {span}" for what in ("tokens per step", "CPU per token") for span in spans)]
    return table(head, ([way, *cells(way, tokens_per_step), *cells(way, relative_cpu)] for way in ways))


def tokens_per_step(counts: Counts, _: Counts) -> float:
    """Tokens that a request gets in a step."""
    return counts["tokens"] / counts["steps"]


def relative_cpu(counts: Counts, first: Counts) -> float:
    """CPU time per token, relative to that of the first way in the same epoch."""
    return counts["cpu"] / counts["tokens"] / (first["cpu"] / first["tokens"])


if __name__ == "__main__":
    main()
