"""Loads the existing runs, and computes means over their seeds."""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

Floats = npt.NDArray[np.float64]
CONFIDENCE = 0.95
PER_EPOCH: dict[str, Callable[[dict[str, Any]], float]] = {
    "tokens_per_step": lambda epoch: epoch["generated"] / epoch["steps"],
    "microseconds": lambda epoch: 1e6 * epoch["seconds"]["rollout"] / epoch["generated"],
}
"""Figures of an epoch that follow from its counts; `microseconds`: CPU time for each generated token."""
FEWEST = 3  # values for an interval: that of two is too wide to tell anything


@dataclass(frozen=True)
class Run:
    """The results and costs of one run."""

    method: str
    seed: int
    epochs: list[dict[str, Any]]
    """The records of `trial.run`."""
    held_out: float
    """Reward after the last epoch on problems that the policy was not trained on."""
    server_seconds: float
    """CPU time of the draft server over the whole run."""

    def total(self, name: str, first: int = 1) -> float:
        """Returns the sum of a count, or of a part of the seconds, over the epochs from `first` on."""
        return float(sum(e[name] if name in e else e["seconds"][name] for e in self.epochs if e["epoch"] >= first))

    def curve(self, name: str) -> Floats:
        """Returns a count or a figure of PER_EPOCH as float64[epochs]; NaN for an epoch without it."""
        of = PER_EPOCH.get(name, itemgetter(name))
        return np.array([np.nan if of(e) is None else of(e) for e in self.epochs], float)


def file_of(folder: Path, method: str, seed: int) -> Path:
    """Returns the file of a run."""
    return folder / f"{method.replace(' ', '_').replace('^', '')}-{seed}.jsonl.gz"


def load(folder: Path, methods: Iterable[str]) -> dict[str, list[Run]]:
    """Returns the runs of each method that has any, in the order of their seeds."""
    found: dict[str, list[Run]] = {}
    for method in methods:
        for seed in range(1, 100):
            file = file_of(folder, method, seed)
            if file.exists():
                *epochs, end, served = map(json.loads, gzip.decompress(file.read_bytes()).splitlines())
                run = Run(method, seed, epochs, end["held_out"], served["server_seconds"])
                found.setdefault(method, []).append(run)
    return found


def mean(values: Iterable[float]) -> tuple[float, float]:
    """Returns the mean, and half the width of its confidence interval (Student's t); NaN for fewer than 3 values."""
    each = np.fromiter(values, float)
    if len(each) < FEWEST:
        return float(each.mean()), float("nan")
    half = stdtrit(len(each) - 1, (1 + CONFIDENCE) / 2) * each.std(ddof=1) / np.sqrt(len(each))
    return float(each.mean()), float(half)


def band(runs: Iterable[Run], name: str) -> tuple[Floats, Floats]:
    """Returns `mean` of a curve, epoch by epoch: two float64[epochs]."""
    curves = np.array([run.curve(name) for run in runs]).T
    both = np.array([mean(values) for values in curves])
    return both[:, 0], both[:, 1]
