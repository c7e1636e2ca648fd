"""Measures the CPU time of engine steps without drafts: what an engine pays that is configured for drafts.

    python -m benchmarks.vllm.undrafted          # needs vllm; about three minutes on two cores
    python -m benchmarks.vllm.undrafted --quick  # to check that it runs; the figures mean nothing

The engines take turns. vLLM's own proposer has a process of its own, because HistoSpec changes vLLM for its process.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
from benchmarks.process import printed
from benchmarks.tables import table

PLAIN = "no speculation"
EMPTY = "vLLM's `custom_class`, a proposer that drafts nothing"
NEVER = "HistoSpec that asks for no drafts (`HISTOSPEC_VERIFY_COST=2`)"
UNKNOWN = "the same, requests without sessions"
PROCESSES = (PLAIN, "no speculation, `async_scheduling` off", EMPTY), (PLAIN, NEVER, UNKNOWN)
PROMPTS = 4  # of a turn, with 8 samples each


class NothingDrafted:
    """A proposer that drafts nothing. vLLM imports it by its name."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing; vLLM's CPU runner calls it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Returns an empty draft for each request."""
        return [[] for _ in sampled_token_ids]


def main() -> None:
    """Prints the table, or the figures of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--batch", type=int, default=8, help="requests side by side")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    if arguments.part is not None:
        print(json.dumps(roll_out(PROCESSES[arguments.part], rounds, arguments.batch)))
        return
    rows = []
    for part, names in enumerate(PROCESSES):
        words = ["--part", str(part), "--rounds", str(rounds), "--batch", str(arguments.batch)]
        figures = printed("benchmarks.vllm.undrafted", *words)
        rows += [cells(name, figures) for name in names[part:]]
    print(table(["engine", "ms per step", "relative to no speculation", "standard error"], rows), end="")


def cells(name: str, figures: Mapping[str, list[float]]) -> list[str]:
    """Returns a row of the table."""
    ratios = [mine / plain for mine, plain in zip(figures[name], figures[PLAIN], strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return [name, f"{1e3 * statistics.median(figures[name]):.3f}", f"{statistics.median(ratios):.3f}", f"{error:.3f}"]


def roll_out(names: tuple[str, ...], rounds: int, batch: int) -> dict[str, list[float]]:
    """Returns the CPU seconds per engine step of each engine in each round."""
    from benchmarks.vllm import epochs
    from examples.draft_server import running
    from examples.tiny_rl import policy
    from examples.tiny_rl.rollout import DRAFTS, RolloutEngine

    size = epochs.settings(quick=False)
    prompts = epochs.prompts(size)
    drafter = {"model": "benchmarks.vllm.undrafted.NothingDrafted"}  # __name__ is __main__ here
    proposer = {"speculative_config": DRAFTS["speculative_config"] | drafter}
    in_turn: dict[str, dict[str, Any]] = {PLAIN: {}, NEVER: DRAFTS, UNKNOWN: DRAFTS, EMPTY: proposer}
    os.environ.update(HISTOSPEC_NAMESPACE="undrafted", HISTOSPEC_VERIFY_COST="2")
    with tempfile.TemporaryDirectory() as name, running(Path(name, "store"), Path(name, "server.log")) as server:
        folder = Path(name)
        os.environ["HISTOSPEC_ENDPOINT"] = server.endpoint
        policy.load().save_pretrained(folder / "policy")
        engines = {
            engine: RolloutEngine(folder / "policy", batch, in_turn.get(engine, {"async_scheduling": False}))
            for engine in names
        }
        figures: dict[str, list[float]] = {engine: [] for engine in names}
        for number in range(-1, rounds):
            start = PROMPTS * number % len(prompts)
            for engine in names[number % len(names) :] + names[: number % len(names)]:
                epoch = None if engine == UNKNOWN else 1
                done = engines[engine].generate(prompts[start : start + PROMPTS], size.samples, epoch)
                if number >= 0:  # the first one warms up
                    figures[engine].append(done.cpu_seconds / done.counts.engine_steps)
    return figures


if __name__ == "__main__":
    main()
