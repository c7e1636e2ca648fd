"""How long a batch of rollouts takes to its last token, when sessions expected to be long may draft more.

    python -m benchmarks.engine.tail DIR      # recordings, as `histospec replay` reads them; a minute each

Every response of the last visit is written at the same time, with the earlier visits as history. A step takes as long
as one without drafts times 1 + cost * drafted / first batch, as on a machine that the first batch just saturates: the
same draft is cheaper as the batch drains. `verify_cost` is told accordingly, as workers learn it.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.engine.rollouts import Rollouts, recorded
from histospec.native import Engine

WEIGHTS = (1.0, 1.5, 2.0, 4.0, 8.0)
COSTS = (0.05, 0.2, 0.4)
SESSIONS = 256


def main() -> None:
    """Prints a table for every recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for rollouts in recorded(arguments.folder, 4_000_000, SESSIONS):
        if not rollouts.live:
            continue
        print(f"\n{rollouts.name}, {len(rollouts.live)} responses: time to the last token, relative to weight 1\n")
        print("| cost of the first batch | " + " | ".join(f"weight {weight:g}" for weight in WEIGHTS) + " |")
        print("|---|" + "---|" * len(WEIGHTS))
        for cost in COSTS:
            taken = [roll_out(rollouts, cost, weight) for weight in WEIGHTS]
            print(f"| {cost} | " + " | ".join(f"{seconds / taken[0]:.3f}" for seconds in taken) + " |")


def roll_out(rollouts: Rollouts, cost: float, tail_weight: float) -> float:
    """Time until the last response is written, in steps without drafts."""
    engine = Engine(2 << 30)
    for prompt, responses in zip(rollouts.prompts, rollouts.history, strict=True):
        engine.ingest("bench", prompt, responses)
    texts = [text for _, text in rollouts.live]
    sessions = np.array([engine.open("bench", rollouts.prompts[problem]) for problem, _ in rollouts.live], np.int64)
    written = np.zeros(len(texts), np.int64)
    new = [text[:1] for text in texts]  # the prompt's own forward pass yields a token
    running = np.arange(len(texts))
    taken = 0.0
    while running.size:
        written[running] += [len(new[i]) for i in running]
        for i in running:
            if written[i] == len(texts[i]):
                engine.close(int(sessions[i]), commit=False)
        running = running[written[running] < [len(texts[i]) for i in running]]
        if not running.size:
            break
        tokens = np.concatenate([new[i] for i in running])
        offsets = np.cumsum([0, *(len(new[i]) for i in running)])
        marginal = cost * running.size / len(texts)
        drafts, bounds, _ = engine.step(
            sessions[running], tokens, offsets, verify_cost=marginal, tail_weight=tail_weight
        )
        taken += 1 + cost * len(drafts) / len(texts)
        for b, i in enumerate(running):
            draft, rest = drafts[bounds[b] : bounds[b + 1]], texts[i][written[i] :]
            size = min(len(draft), len(rest) - 1)
            wrong = np.flatnonzero(draft[:size] != rest[:size])
            new[i] = rest[: (wrong[0] if wrong.size else size) + 1]
    return taken


if __name__ == "__main__":
    main()
