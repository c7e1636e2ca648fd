"""Compares steps of sessions with and without seeds: `python -m benchmarks.engine.seeded [--quick] [--noise position]`.

`--noise position --texts demo --epochs 12 --seed 1 2 3 4 5` tells what drafts save that foresee the noise of vLLM's
model runner V2.

With a seed, the engine computes the noise of the candidates. The texts are sampled with coupled sampling and a fresh
seed each (scripts/foresight_rollouts.py). Three engines take turns step by step on the same texts: in two the sessions
have their seeds, and one of these also gets the alternatives of finished responses. Time is CPU time of the process;
each figure is a median over steps.

    same length   drafts of 8 tokens, sessions advance by 3 tokens in each step
    as it is      drafts end where they no longer pay (cost 0.05, at most 64 tokens), and sessions advance by what was
                  accepted and one token more; the number of steps differs
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.rl_study.overlap import common_prefix
from histospec.native import Engine
from scripts import foresight_rollouts as rollouts

LENGTH, ADVANCE = 8, 3  # tokens of a draft, and of a step, of the same length
LONGEST, COST = 64, 0.05
BATCH = 64
KINDS: dict[str, Callable[..., Iterator[rollouts.Epoch]]] = {"demo": rollouts.demo, "forks": rollouts.forks}
NOISE: dict[str, rollouts.Noise] = {"place": rollouts.Places, "position": rollouts.Positions}


@dataclass
class Side:
    """An engine, and the times of its steps."""

    name: str
    seeded: bool
    alternatives: bool
    position_noise: bool
    engine: Engine = field(default_factory=lambda: Engine(threads=1))
    micros: list[float] = field(default_factory=list)
    """CPU time of each step per session."""
    sessions: int = 0
    """Steps, counted once per session."""
    later: int = 0
    """Those behind the first epoch, which has no history."""
    drafted: int = 0
    seconds: float = 0.0


@dataclass
class Running:
    """A session and its response."""

    number: int
    response: list[int]
    known: int = 0
    new: int = 1
    """How many tokens come next."""


def batches(epoch: rollouts.Epoch) -> Iterator[list[tuple[list[int], list[int], int, bytes]]]:
    """Yields prompt, response, seed and alternatives of about BATCH responses at a time; a group is not divided."""
    some: list[tuple[list[int], list[int], int, bytes]] = []
    for group in epoch:
        responses = zip(group.responses, group.seeds, group.alternatives, strict=True)
        some += [(group.prompt, *response) for response in responses]
        if len(some) >= BATCH:
            yield some
            some = []
    if some:
        yield some


def step(side: Side, running: list[Running], same: bool) -> None:
    """Steps all sessions once, and notes what comes next."""
    news = [one.response[one.known : one.known + one.new] for one in running]
    arrays = (
        np.array([one.number for one in running]),
        np.concatenate([np.array(new, np.int32) for new in news]),
        np.cumsum([0, *map(len, news)]),
    )
    start = time.process_time()
    tokens, offsets, _ = side.engine.step(*arrays, *((LENGTH, 0.0) if same else (LONGEST, COST)))
    took = time.process_time() - start
    side.micros.append(took / len(running) * 1e6)
    side.seconds += took
    side.sessions += len(running)
    side.drafted += len(tokens)
    for i, one in enumerate(running):
        one.known += len(news[i])
        draft = tokens[offsets[i] : offsets[i + 1]].tolist()
        right = common_prefix(draft, one.response[one.known :])
        one.new = ADVANCE if same else right + 1


def replay(epochs: Iterable[rollouts.Epoch], sides: list[Side], same: bool) -> None:
    """Replays the epochs through the engines in turns. Who steps first on the same texts is some 15 % slower, so the
    order changes with every step."""
    for number, epoch in enumerate(epochs):
        for some in batches(epoch):
            open_ = [
                [
                    Running(
                        side.engine.open(
                            "run", prompt, seed=seed if side.seeded else None, position_noise=side.position_noise
                        ),
                        response,
                    )
                    for prompt, response, seed, _ in some
                ]
                for side in sides
            ]
            left = [list(running) for running in open_]
            order = list(range(len(sides)))
            while any(left):
                for i in order:
                    if left[i]:
                        step(sides[i], left[i], same)
                        sides[i].later += len(left[i]) if number else 0
                        left[i] = [one for one in left[i] if one.known < len(one.response)]
                order.append(order.pop(0))
            for side, running in zip(sides, open_, strict=True):
                for one, (*_, alternatives) in zip(running, some, strict=True):
                    kept = alternatives if side.alternatives else b""
                    side.engine.close(one.number, epoch=number, alternatives=kept)
                side.engine.wait_until_built()


def main() -> None:
    """Prints figures for each kind of text, seed and way to step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two epochs; the figures mean nothing")
    parser.add_argument("--seed", type=int, nargs="+", default=[2], help="seeds of the texts, a run each (default: 2)")
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of text (default: all)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--noise", choices=NOISE, default="place", help="what the noise depends on")
    arguments = parser.parse_args()
    epochs = 2 if arguments.quick else arguments.epochs
    for kind, seed in itertools.product(arguments.texts, arguments.seed):
        texts = list(KINDS[kind](seed, epochs, kind=NOISE[arguments.noise]))
        for same in (True, False):
            print(f"{kind}, seed {seed}, {'same length' if same else 'as it is'}")
            compare(texts, same, arguments.noise == "position")


def compare(epochs: list[rollouts.Epoch], same: bool, position_noise: bool) -> None:
    """Replays the epochs, and prints a line for each way to open sessions."""
    sides = [
        Side("without seeds", False, False, position_noise),
        Side("with seeds", True, False, position_noise),
        Side("with seeds and alternatives", True, True, position_noise),
    ]
    replay(epochs, sides, same)
    first = statistics.median(sides[0].micros)
    for side in sides:
        median = statistics.median(side.micros)
        print(
            f"  {side.name + ':':28} {median:.2f} us a session step ({median / first:.2f}x), "
            f"{side.drafted / side.sessions:.2f} drafted tokens, {side.sessions} steps, "
            f"{side.later} of them ({sides[0].later / side.later:.2f}x fewer) behind the first epoch, "
            f"CPU time {side.seconds / sides[0].seconds:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
