"""Sorts the prompts of a batch by the expected length of their responses, longest first.

An engine has a number of slots. A long response that starts last keeps the whole batch waiting, while the other slots
are empty. If the long ones start first, the short ones fill the slots beside them::

    python -m examples.longest_first RECORDING.jsonl.gz --slots 32

It starts a server and gives it the epochs of a recording (docs/replay.md), one after the other. Before each epoch it
asks for the expected lengths of all prompts, in one call. It prints how long the epoch's responses then occupy the
slots, as a share of the time in the order of the recording.
"""

import argparse
import heapq
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from examples.draft_server import running
from histospec.client import DraftClient, Response
from histospec.client.values import LengthPrediction
from histospec.replay.recordings import Problem, RecordingError, read

LONGEST = 1.0
"""The quantile to sort by: one long response keeps the batch waiting, and the mean says little about it."""


class Epoch(NamedTuple):
    """The times of one epoch, in tokens of the longest slot."""

    epoch: int
    as_recorded: int
    expected: int
    """Longest first, by expected lengths."""
    known: int
    """Longest first, by the lengths that the responses turn out to have: the best that an order can do."""


def longest_first(predictions: Sequence[LengthPrediction | None]) -> list[int]:
    """Returns the places of the prompts in the order in which to start them.

    Args:
        predictions: one for each prompt, with one quantile, as `DraftClient.predict_lengths` returns them. A prompt
            without a prediction comes first, because its responses may be long.
    """
    longest = [p.lengths[0] if p is not None and len(p.lengths) else float("inf") for p in predictions]
    return sorted(range(len(longest)), key=lambda place: -longest[place])


def makespan(lengths: Iterable[int], slots: int) -> int:
    """Returns when the last response ends: each starts in the slot that is free first. Lengths and result in tokens."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def follow(client: DraftClient, problems: Sequence[Problem], slots: int) -> list[Epoch]:
    """Returns the times of every epoch that has an earlier one, and gives the server the epochs."""
    epochs = sorted({response.epoch for problem in problems for response in problem.responses})
    times = []
    for number in epochs:
        visited = [problem for problem in problems if number in problem.epochs()]
        texts = [[r.flat() for r in problem.responses if r.epoch == number] for problem in visited]
        prompts = [problem.prompt for problem in visited]
        if number != epochs[0]:
            expected = longest_first(client.predict_lengths(prompts, quantiles=[LONGEST]))
            groups = [[len(text) for text in group] for group in texts]
            orders = groups, [groups[place] for place in expected], sorted(groups, key=max, reverse=True)
            recorded, first, best = (makespan(chain.from_iterable(order), slots) for order in orders)
            times.append(Epoch(number, recorded, first, best))
        client.ingest_many(prompts, [[Response(text) for text in group] for group in texts], epoch=number)
    return times


def main() -> None:
    """Prints a line for each epoch and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="recorded rollouts of several epochs, as token ids")
    parser.add_argument("--slots", type=int, default=32, help="responses that run at the same time (default: 32)")
    arguments = parser.parse_args()
    if arguments.slots < 1:
        parser.error(f"--slots: is {arguments.slots}, must be at least 1")
    try:
        with arguments.recording.open("rb") as file:
            problems = list(read(file))
    except (OSError, RecordingError) as error:
        parser.error(f"{arguments.recording}: {error}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder / "data", folder / "log") as server, DraftClient(server.endpoint, "lengths") as client:
            times = follow(client, problems, arguments.slots)
    if not times:
        parser.error(f"{arguments.recording}: has one epoch; there is nothing to expect lengths from")
    print("epoch  expected  known")
    shares = [(time.expected / time.as_recorded, time.known / time.as_recorded) for time in times]
    for time, (expected, known) in zip(times, shares, strict=True):
        print(f"{time.epoch:5}  {expected:8.2f}  {known:5.2f}")
    expected, known = (statistics.fmean(column) for column in zip(*shares, strict=True))
    print(f" mean  {expected:8.2f}  {known:5.2f}")


if __name__ == "__main__":
    main()
