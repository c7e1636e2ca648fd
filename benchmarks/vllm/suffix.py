"""Compares HistoSpec with vLLM's own suffix decoding, in real vLLM, on the policies of a real RL run.

    python -m benchmarks.vllm.suffix                # needs vllm and arctic-inference; half an hour on two cores
    python -m benchmarks.vllm.suffix --quick        # to check that it runs; the figures mean nothing

The run of examples/tiny_rl is trained once, without drafts, and the policy of every epoch is kept. Then each method
generates the rollouts of every epoch with those weights and the same prompts, sampling and seeds. One engine runs all
epochs, so that each method has the history of the run. Every method and seed has a process of its own; methods take
turns.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.process import printed
from benchmarks.tables import table
from benchmarks.turns import median_row
from examples.draft_server import running

Epochs = list[dict[str, float]]
"""The counts of each, see epochs.roll_out."""

DRAFTED = 16
COST = 0.05  # verify cost of the speed-up S_c in the table


def suffix(**options: float) -> dict[str, Any]:
    """vLLM's arguments for suffix decoding."""
    named = {f"suffix_decoding_{name}": value for name, value in options.items()}
    return {"speculative_config": {"method": "suffix", "num_speculative_tokens": DRAFTED, **named}}


METHODS: dict[str, tuple[dict[str, str], dict[str, Any] | None]] = {
    # name: environment, vLLM's arguments; None: those of HistoSpec
    "HistoSpec": ({"HISTOSPEC_VERIFY_COST": str(COST)}, None),
    "HistoSpec, learned cost": ({"HISTOSPEC_VERIFY_COST": "auto"}, None),
    "suffix, defaults": ({}, suffix()),
    "suffix, probability 0.3": ({}, suffix(min_token_prob=0.3)),
    "suffix, factor 4": ({}, suffix(max_spec_factor=4.0)),
}


def main() -> None:
    """Runs the comparison, or one part of it in a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few problems, three epochs, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--part", nargs=3, metavar=("METHOD", "SEED", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        method, seed, folder = arguments.part
        print(json.dumps(part(method, int(seed), Path(folder), arguments.quick)))
        return
    result = compare(arguments.quick, 1 if arguments.quick else arguments.seeds)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


def part(method: str, seed: int, folder: Path, quick: bool) -> Epochs:
    """Runs one method on the policies in the folder."""
    from benchmarks.vllm import epochs
    from examples.tiny_rl.rollout import DRAFTS

    _, options = METHODS[method]
    return list(epochs.roll_out(folder, epochs.settings(quick), {"seed": seed} | (options or DRAFTS)))


def compare(quick: bool, seeds: int) -> dict[str, list[Epochs]]:
    """Prints the table of methods, with medians over the seeds. Returns the figures of each method, seed by seed."""
    from benchmarks.vllm import epochs

    results: dict[str, list[Epochs]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        epochs.train(folder, epochs.settings(quick))
        with running(folder / "store", folder / "server.log") as server:
            for seed in range(1, seeds + 1):
                for method, (environment, _) in METHODS.items():
                    told = {"HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": f"{method} {seed}"}
                    words = ["--part", method, str(seed), name, *(["--quick"] if quick else [])]
                    found = printed("benchmarks.vllm.suffix", *words, environment=told | environment)
                    results[method].append(found)
                    print(f"seed {seed}, {method}: {summary(found)}", file=sys.stderr)
    head = ["method", "tokens a step, epochs 2+", "drafted a step", "accepted", f"S_{COST}", "seconds"]
    print("\n" + table(head, (_cells(method, runs) for method, runs in results.items())), end="")
    return results


def _cells(method: str, runs: list[Epochs]) -> list[str]:
    row = median_row([summary(run) for run in runs])
    each = f"{row['tokens_a_step']:.2f}", f"{row['drafted_a_step']:.2f}", f"{row['accepted']:.0%}"
    return [method, *each, f"{row['speed_up']:.2f}", f"{row['seconds']:.1f}"]


def summary(epochs: Epochs) -> dict[str, float]:
    """Returns the figures of epochs 2 and later."""
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
