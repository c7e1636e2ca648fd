"""Trains the starting weights of the foresight; scripts/train-foresight runs it.

The network is that of native/src/draft/foresight.h. scripts/foresight_rollouts.py makes the texts, and
scripts/train_estimator.py trains. All kinds of text have the same weight.
"""

import argparse
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from scripts import estimator_examples as data
from scripts import foresight_rollouts as rollouts
from scripts import train_estimator as estimator

HEADER = Path(__file__).parents[1] / "native/src/draft/foresight_weights.h"
KINDS: dict[str, Callable[[int], Iterator[rollouts.Epoch]]] = {"demo": rollouts.demo, "forks": rollouts.forks}
TRAINED, HELD_OUT = 0, 1  # seeds of the rollouts


def examples(tool: Path, epochs: Iterable[rollouts.Epoch]) -> npt.NDArray[np.void]:
    """Returns the examples from replaying these epochs, as data.EXAMPLE[n]; tags are numbers of epochs."""
    return data.replay(tool, _commands(epochs))


def _commands(epochs: Iterable[rollouts.Epoch]) -> Iterator[data.Words]:
    yield [data.NEW_NAMESPACE]
    for number, groups in enumerate(epochs):
        for group in groups:
            head: data.Words = [group.problem, len(group.prompt), np.array(group.prompt, np.int32), len(group.seeds)]
            texts: list[data.Words] = [[1, 1, len(text), np.array(text, np.int32)] for text in group.responses]
            seeds: list[data.Words] = [[seed >> 31, seed & 0x7FFFFFFF] for seed in group.seeds]
            yield [data.PLAY, *head, number, *itertools.chain(*texts, *seeds)]
            yield [data.INGEST, *head, *itertools.chain.from_iterable([number, *text] for text in texts)]


def main() -> None:
    """Makes rollouts, replays them, trains, writes."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-foresight", description="Trains the foresight's starting weights."
    )
    parser.add_argument("--out", type=Path, default=HEADER, help="the C++ header to write")
    parser.add_argument("--tool", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=Path, default=Path(), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.chdir(arguments.start)  # the paths are relative to it
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    sets = {
        seed: {kind: examples(arguments.tool, make(seed)) for kind, make in KINDS.items()}
        for seed in (TRAINED, HELD_OUT)
    }
    parts = list(sets[TRAINED].values())
    net = estimator.train(np.concatenate(parts), estimator.equal([np.ones(len(part), np.float32) for part in parts]))
    for name, seed in (("trained on", TRAINED), ("held out", HELD_OUT)):
        for kind, part in sets[seed].items():
            console.print(f"log-loss {name}, {kind}: {estimator.log_loss(net, part):.4f} ({len(part):,} examples)")
    lines = [f"// {kind}: {len(part):,} examples" for kind, part in sets[TRAINED].items()]
    text = estimator.header(net, "a foresight starts from", "train-foresight", "kForesightWeights", "\n".join(lines))
    estimator.replace(arguments.out, text)


if __name__ == "__main__":
    main()
