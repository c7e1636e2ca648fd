"""Trains the starting weights of the estimator; scripts/train-estimator runs it.

The network is that of native/src/draft/estimator.h, without its token biases:

    hidden = relu(x @ inputs + sum of row[rows])        log-odds = x @ direct + sum of row_odds[rows] + hidden @ output

Adam minimises the logistic loss with a small ridge penalty. Every kind of text has the same weight, whatever its size.
The same files give the same weights.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from histospec.replay.recordings import RecordingError
from scripts import estimator_examples as data

HIDDEN = 8
ROWS = 50  # 4 sources x 11 levels, 6 classes of runs
SEED, PASSES, BATCH, RATE, LAST_RATE, RIDGE = 0, 6, 256, 0.01, 0.0002, 1e-6
# Weight of an example: a run visits a problem for the first time once, and then again many times.
WEIGHTS = {"history": 1.0, "siblings": 1.0, "first visit": 0.3}
HEADER = Path(__file__).parents[1] / "native/src/draft/starting_weights.h"

Floats = npt.NDArray[np.float32]
Network = dict[str, Floats]


def log_odds(net: Network, x: Floats, uses: Floats) -> tuple[Floats, Floats]:
    """Returns the log-odds of each candidate, float32[n], and its hidden layer, float32[n, HIDDEN].

    Args:
        net: the network.
        x: the inputs, float32[n, inputs].
        uses: the rows of each candidate, one-hot, float32[n, ROWS].
    """
    hidden = np.maximum(x @ net["inputs"] + uses @ net["row"], 0)
    return x @ net["direct"] + uses @ net["row_odds"] + hidden @ net["output"], hidden


def one_hot(rows: npt.NDArray[np.uint8]) -> Floats:
    """Returns row numbers [n, 5] as one-hot float32[n, ROWS]."""
    uses = np.zeros((len(rows), ROWS), np.float32)
    np.put_along_axis(uses, rows.astype(np.int64), 1, 1)
    return uses


def train(examples: npt.NDArray[np.void], weight: Floats) -> Network:
    """Returns the network fitted to the examples; `weight` has the weight of each."""
    rng = np.random.default_rng(SEED)
    inputs = examples["x"].shape[1]
    start = {
        "inputs": rng.normal(0, 0.3 / inputs**0.5, (inputs, HIDDEN)),
        "row": np.zeros((ROWS, HIDDEN)),
        "output": rng.normal(0, 0.3, HIDDEN),
        "row_odds": np.zeros(ROWS),
        "direct": np.zeros(inputs),
    }
    net: Network = {name: part.astype(np.float32) for name, part in start.items()}
    mean, square = ({name: np.zeros_like(part) for name, part in net.items()} for _ in range(2))
    batches = max(1, len(examples) // BATCH)
    step = 0
    for _ in range(PASSES):
        for batch in np.array_split(rng.permutation(len(examples)), batches):
            x, uses = examples["x"][batch], one_hot(examples["rows"][batch])
            odds, hidden = log_odds(net, x, uses)
            probability = 1 / (1 + np.exp(-np.clip(odds, -12, 12)))
            error = weight[batch] * (probability - examples["right"][batch]) / np.float32(len(batch))
            back = (hidden > 0) * error[:, None] * net["output"]
            slope = {
                "inputs": x.T @ back,
                "row": uses.T @ back,
                "output": hidden.T @ error,
                "row_odds": uses.T @ error,
                "direct": x.T @ error,
            }
            step += 1
            rate = RATE * (LAST_RATE / RATE) ** (step / (PASSES * batches))
            for name, part in net.items():
                gradient = slope[name] + RIDGE * part
                mean[name] += 0.1 * (gradient - mean[name])
                square[name] += 0.01 * (gradient**2 - square[name])
                part -= rate * (mean[name] / (1 - 0.9**step)) / (np.sqrt(square[name] / (1 - 0.99**step)) + 1e-4)
    return net


def log_loss(net: Network, examples: npt.NDArray[np.void]) -> float:
    """Returns the mean log-loss of the examples, in nats."""
    total = 0.0
    for part in np.array_split(examples, len(examples) // 100_000 + 1):
        odds, _ = log_odds(net, part["x"], one_hot(part["rows"]))
        total += float(np.logaddexp(0, np.where(part["right"] > 0, -odds, odds)).sum())
    return total / len(examples)


def weigh(kinds: list[npt.NDArray[np.void]]) -> Floats:
    """Returns the weight of each example, kind after kind: the same for all kinds, and 1 on average."""
    of_tag = np.array([WEIGHTS[situation] for situation in data.SITUATIONS])
    return equal([of_tag[kind["tag"]] for kind in kinds])


def equal(parts: list[Floats]) -> Floats:
    """Returns these weights, part after part, scaled so that each part weighs the same and the mean is 1."""
    weight = np.concatenate([part / part.sum() for part in parts])
    return np.asarray(weight / weight.mean(), np.float32)


def header(net: Network, purpose: str, script: str, name: str, how: str) -> str:
    """Returns the C++ header with the network, in the order of Network::each_part."""
    numbers = [f"{value:.3f}f" for part in net.values() for value in part.ravel()]
    lines = "\n".join(f"    {', '.join(numbers[i : i + 10])}," for i in range(0, len(numbers), 10))
    return f"""\
// The weights that {purpose}: made by scripts/{script}, not by hand.
//
{how}
#pragma once

#include <array>

namespace histospec {{

// clang-format off
// inputs, rows, output, row odds, direct
inline constexpr std::array<float, {len(numbers)}> {name} = {{
{lines}
}};
// clang-format on

}}  // namespace histospec
"""


def replace(path: Path, text: str) -> None:
    """Writes a file atomically."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    os.replace(new, path)


def main() -> None:
    """Reads, replays, trains, writes; exits with 1 if a file is not a recording or no problem is left for training."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-estimator", description="Trains the estimator's starting weights."
    )
    parser.add_argument("files", nargs="+", type=Path, help="recorded rollouts, one kind of text each")
    parser.add_argument(
        "--held-out",
        type=int,
        default=60,
        help="how many problems of each file are not used for training (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=HEADER, help="the C++ header to write")
    parser.add_argument("--tool", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=Path, default=Path(), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.chdir(arguments.start)  # the paths are relative to it
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    kinds: dict[str, npt.NDArray[np.void]] = {}
    tests: dict[str, npt.NDArray[np.void]] = {}
    problems: dict[str, int] = {}
    for path in arguments.files:
        try:
            split = data.split(path, arguments.held_out)
        except (OSError, RecordingError) as error:
            sys.exit(f"{path}: {error}")
        tests[split.kind] = data.examples(arguments.tool, split.held_out, targets=2)
        if not split.train:
            console.print(f"{split.kind}: all {len(split.held_out)} problems are held out, none is left for training")
            continue
        kinds[split.kind] = data.examples(arguments.tool, split.train)
        problems[split.kind] = len(split.train)
        console.print(f"{split.kind}: {len(split.train)} problems, {len(kinds[split.kind]):,} examples")
    if not kinds:
        sys.exit("no problem is left for training: lower --held-out")

    trained_on = list(kinds.values())
    net = train(np.concatenate(trained_on), weigh(trained_on))
    for name, sets in (("trained on", kinds), ("held out", tests)):
        for kind, part in sets.items():
            losses = [
                f"{situation} {log_loss(net, part[part['tag'] == tag]):.4f}"
                for tag, situation in enumerate(data.SITUATIONS)
                if np.any(part["tag"] == tag)
            ]
            console.print(f"log-loss {name}, {kind}: {log_loss(net, part):.4f} ({', '.join(losses)})")
    lines = [f"// {kind}: {len(part):,} examples from {problems[kind]} problems" for kind, part in kinds.items()]
    lines.append(f"// Held out: {arguments.held_out} problems of each file. Every kind weighs the same.")
    text = header(net, "an estimator starts from", "train-estimator", "kStartingWeights", "\n".join(lines))
    replace(arguments.out, text)


if __name__ == "__main__":
    main()
