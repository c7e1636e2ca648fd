"""Measures large batches in real vLLM, for which drafts hardly pay: are they slower than without speculation?

    python -m benchmarks.vllm.saturated             # needs vllm; twelve minutes on two cores
    python -m benchmarks.vllm.saturated --heavy 16  # a policy so slow that every token of a batch costs: saturated
    python -m benchmarks.vllm.saturated --quick     # to check that it runs; the figures mean nothing

Two engines with the same configuration in one process differ by several percent for the life of the process, because of
the location of their memory. So several processes, each with the engines in another order, generate rollouts of the
demo's policy in turns, and the result is the median over processes.

A step of the demo's policy is mostly vLLM's own work in Python, to which a drafted token adds little. `--heavy N` gives
each layer N times as many neurons; the new ones have weights of zero. The policy then generates the same text in the
time of a policy whose arithmetic uses the whole machine.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
from benchmarks.process import printed
from benchmarks.tables import table
from benchmarks.turns import median_row
from examples.draft_server import running

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Figures = dict[str, float]

PLAIN = "no speculation"
COSTS = {"HistoSpec, learned cost": "auto", "HistoSpec, cost 1": "1"}


def main() -> None:
    """Prints the table, or the figures of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one process, one round")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256, help="requests side by side")
    parser.add_argument("--heavy", type=int, default=1, help="how much wider the policy's layers are")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.processes = arguments.rounds = 1
    if arguments.part is not None:
        print(json.dumps(roll_out(arguments.part, arguments.rounds, arguments.batch, arguments.heavy)))
        return
    words = ["--rounds", str(arguments.rounds), "--batch", str(arguments.batch), "--heavy", str(arguments.heavy)]
    parts: list[dict[str, Figures]] = []
    for part in range(arguments.processes):
        parts.append(printed("benchmarks.vllm.saturated", "--part", str(part), *words))
        print(f"process {part}: {parts[-1]}", file=sys.stderr)
    head = ["engine", "tokens a step", "us a token", "beside plain, each process", "median", "in HistoSpec's calls"]
    print("\n" + table(head, (_cells(engine, parts) for engine in [PLAIN, *COSTS])), end="")


def _cells(engine: str, parts: list[dict[str, Figures]]) -> list[str]:
    each = [part[engine]["seconds"] / part[PLAIN]["seconds"] for part in parts]
    row = median_row([part[engine] for part in parts])
    beside = f"{min(each):.3f} to {max(each):.3f}", f"{statistics.median(each):.3f}"
    return [engine, f"{row['tokens_a_step']:.2f}", f"{1e6 * row['seconds']:.1f}", *beside, f"{row['ours']:.1%}"]


def widened(model: "LlamaForCausalLM", times: int) -> "LlamaForCausalLM":
    """Returns the same policy with `times` as many neurons per layer, the new ones with weights of zero, in float32."""
    from torch import float32, nn
    from transformers import LlamaForCausalLM

    config = type(model.config)(
        **(model.config.to_dict() | {"intermediate_size": times * model.config.intermediate_size})
    )
    wide = LlamaForCausalLM(config)
    state = wide.state_dict()
    for name, weights in model.state_dict().items():
        state[name].zero_()
        state[name][tuple(map(slice, weights.shape))] = weights
    wide.load_state_dict(state)
    return nn.Module.to(wide, float32)


def roll_out(turn: int, rounds: int, batch: int, heavy: int) -> dict[str, Figures]:
    """Returns medians over the rounds by engine: seconds per token, tokens per step, share of HistoSpec's calls."""
    from benchmarks.vllm import epochs
    from benchmarks.vllm.calls import in_histospec
    from examples.tiny_rl import policy
    from examples.tiny_rl.rollout import DRAFTS, RolloutEngine

    size = epochs.settings(quick=False)
    samples = max(1, batch // size.problems)
    ours = in_histospec()
    os.environ["HISTOSPEC_NAMESPACE"] = "saturated"
    with tempfile.TemporaryDirectory() as name, running(Path(name, "store"), Path(name, "server.log")) as server:
        folder = Path(name)
        os.environ["HISTOSPEC_ENDPOINT"] = server.endpoint
        widened(policy.load(), heavy).save_pretrained(folder / "policy")
        engines: dict[str, RolloutEngine] = {}
        names = [PLAIN, *COSTS]
        for engine in names[turn % len(names) :] + names[: turn % len(names)]:
            os.environ["HISTOSPEC_VERIFY_COST"] = COSTS.get(engine, "1")
            engines[engine] = RolloutEngine(folder / "policy", batch, DRAFTS if engine in COSTS else {})
        figures: dict[str, list[Figures]] = {engine: [] for engine in engines}
        for number in range(rounds + 1):
            order = list(engines) if number % 2 else list(reversed(engines))
            for engine in order:
                ours.seconds = 0.0
                rollouts = engines[engine].generate(epochs.prompts(size), samples, 0)
                if number:  # the first one warms up
                    # Time per token, because samples differ in length.
                    figures[engine].append(
                        {
                            "seconds": rollouts.seconds / rollouts.tokens,
                            "tokens_a_step": rollouts.tokens_per_step,
                            "ours": ours.seconds / rollouts.seconds,
                        }
                    )
    return {engine: median_row(rows) for engine, rows in figures.items()}


if __name__ == "__main__":
    main()
