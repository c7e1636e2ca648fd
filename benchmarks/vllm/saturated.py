"""A large batch in real vLLM, where drafts hardly pay or not at all: is it slower than without speculation?

    python -m benchmarks.vllm.saturated             # needs vllm; twelve minutes on two cores
    python -m benchmarks.vllm.saturated --heavy 16  # a policy so slow that every token of a batch costs: saturated
    python -m benchmarks.vllm.saturated --quick     # proves that it runs; the figures mean nothing

Two engines with the same configuration in one process differ by several percent, for as long as the process lives: by
where their memory lies. So several processes, each with the engines in another order, roll out the demo's policy in
turns, and the median over processes is stated.

A step of the demo's policy is mostly vLLM's own work in Python, which a drafted token hardly adds to. `--heavy N` gives
each layer N times as many neurons, all new ones with weights of zero: it writes the same, and takes the time of a
policy whose arithmetic fills the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.vllm import suffix as vllm_suffix  # sets the environment that vLLM reads when it is imported

PLAIN = "no speculation"
COSTS = {"HistoSpec, learned cost": "auto", "HistoSpec, cost 1": "1"}
HOOKS = ("open", "announce", "send", "tell", "receive", "finish", "settle")


def main() -> None:
    """Prints the table, or one process' figures."""
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
    parts = []
    for part in range(arguments.processes):
        command = [sys.executable, "-m", "benchmarks.vllm.saturated", "--part", str(part)]
        command += ["--rounds", str(arguments.rounds), "--batch", str(arguments.batch), "--heavy", str(arguments.heavy)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        parts.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"process {part}: {parts[-1]}", file=sys.stderr)
    print("\n| engine | tokens a step | us a token | beside plain, each process | median | in HistoSpec's calls |")
    print("|---|---|---|---|---|---|")
    for engine in [PLAIN, *COSTS]:
        each = [part[engine]["seconds"] / part[PLAIN]["seconds"] for part in parts]
        row = {key: statistics.median(part[engine][key] for part in parts) for key in parts[0][engine]}
        print(
            f"| {engine} | {row['tokens_a_step']:.2f} | {1e6 * row['seconds']:.1f} "
            f"| {min(each):.3f} to {max(each):.3f} | {statistics.median(each):.3f} | {row['ours']:.1%} |"
        )


def widened(model: Any, times: int) -> Any:
    """The same policy with `times` as many neurons a layer; those that are new have weights of zero."""
    import torch
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
    return wide.to(torch.float32)


def roll_out(turn: int, rounds: int, batch: int, heavy: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by engine: seconds a token, tokens a step, the share of the time spent in our calls."""
    from examples import draft_server
    from examples.tiny_rl import policy
    from examples.tiny_rl.rollout import DRAFTS, RolloutEngine

    size = vllm_suffix.settings(quick=False)
    samples = max(1, batch // size.problems)
    ours = timed_calls()
    os.environ["HISTOSPEC_NAMESPACE"] = "saturated"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(draft_server.running(folder / "store", folder / "server.log"))
        os.environ["HISTOSPEC_ENDPOINT"] = server.endpoint
        widened(policy.load(), heavy).save_pretrained(folder / "policy")
        engines = {}
        names = [PLAIN, *COSTS]
        for engine in names[turn % len(names) :] + names[: turn % len(names)]:
            os.environ["HISTOSPEC_VERIFY_COST"] = COSTS.get(engine, "1")
            engines[engine] = RolloutEngine(folder / "policy", batch, DRAFTS if engine in COSTS else {})
        figures: dict[str, dict[str, list[float]]] = {
            engine: {"seconds": [], "tokens_a_step": [], "ours": []} for engine in engines
        }
        for number in range(rounds + 1):
            order = list(engines) if number % 2 else list(reversed(engines))
            for engine in order:
                ours[0] = 0.0
                rollouts = engines[engine].generate(vllm_suffix.prompts(size), samples, 0)
                if number:  # the first warms up
                    # Samples differ in length; a token is what the time is for.
                    figures[engine]["seconds"].append(rollouts.seconds / rollouts.tokens)
                    figures[engine]["tokens_a_step"].append(rollouts.tokens_per_step)
                    figures[engine]["ours"].append(ours[0] / rollouts.seconds)
    return {
        engine: {key: statistics.median(values) for key, values in rows.items()} for engine, rows in figures.items()
    }


def timed_calls(owner: Any = None, hooks: Iterable[str] = HOOKS) -> list[float]:
    """[seconds spent in the methods `hooks` of the class `owner`], counting from here on.

    Without arguments, the adapter's calls to the client.
    """
    if owner is None:
        from histospec.client.vllm.sessions import RequestSessions

        owner = RequestSessions
    total, inside = [0.0], [False]

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:  # restart() opens, settle() tells
                return function(*args, **kwargs)
            inside[0], start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total[0] += time.perf_counter() - start
                inside[0] = False

        return call

    for name in hooks:
        setattr(owner, name, timed(getattr(owner, name)))
    return total


if __name__ == "__main__":
    main()
