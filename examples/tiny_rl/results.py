"""The results of an epoch, and the promises that a run has to keep."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.draft_server import Drafts, Lookups


@dataclass(frozen=True)
class Side:
    """One way to roll out an epoch: with drafts or without."""

    rewards: list[list[float]]
    """One row per problem, one column per sample."""
    tokens: int
    request_steps: int
    engine_steps: int
    drafted: int
    accepted: int
    seconds: float
    cpu_seconds: float
    history: Drafts | None = None
    """The server's part of the drafted tokens; the rest is the draft model's. None: there is no draft model."""

    @property
    def samples(self) -> int:
        """How many responses there are."""
        return sum(map(len, self.rewards))

    @property
    def reward(self) -> float:
        """Mean reward of all responses."""
        return sum(map(sum, self.rewards)) / self.samples

    @property
    def length(self) -> float:
        """Mean tokens per response."""
        return self.tokens / self.samples

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per request step; exactly 1 without drafts."""
        return self.tokens / self.request_steps

    @property
    def by_drafter(self) -> dict[str, Drafts]:
        """The drafted tokens by drafter; empty without a draft model."""
        if self.history is None:
            return {}
        rest = Drafts(self.drafted, self.accepted) - self.history
        drafted = max(rest.drafted, 0)  # the server may count a few tokens more than vLLM
        return {"history": self.history, "drafter": Drafts(drafted, min(max(rest.accepted, 0), drafted))}

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that vLLM accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Epoch:
    """One epoch, rolled out both ways on the same weights."""

    number: int
    with_drafts: Side
    without: Side
    lookups: Lookups
    """Increase of the counters in /metrics during the epoch."""
    train_seconds: float

    @property
    def fewer_request_steps(self) -> float:
        """Request steps without drafts, divided by those with drafts."""
        return self.without.request_steps / self.with_drafts.request_steps

    @property
    def fewer_engine_steps(self) -> float:
        """Forward passes of the batch without drafts, divided by those with drafts."""
        return self.without.engine_steps / self.with_drafts.engine_steps

    @property
    def fewer_steps(self) -> float:
        """The headline: the smaller of the two ratios."""
        return min(self.fewer_request_steps, self.fewer_engine_steps)

    @property
    def faster(self) -> float:
        """Seconds of the rollouts without drafts, divided by those with drafts."""
        return self.without.seconds / self.with_drafts.seconds

    @property
    def less_cpu(self) -> float:
        """CPU seconds of the rollouts without drafts, divided by those with drafts, without the draft server."""
        return self.without.cpu_seconds / self.with_drafts.cpu_seconds

    def as_json(self) -> dict[str, object]:
        """Returns all fields and figures, with rewards as means."""
        sides = {}
        for name, side in (("with_drafts", self.with_drafts), ("without_drafts", self.without)):
            figures = {"reward": side.reward, "length": side.length, "tokens_per_step": side.tokens_per_step}
            counted = {key: value for key, value in asdict(side).items() if key != "rewards" and value is not None}
            sides[name] = {**figures, "acceptance": side.acceptance, **counted}
        return {
            "epoch": self.number,
            **sides,
            "fewer_request_steps": self.fewer_request_steps,
            "fewer_engine_steps": self.fewer_engine_steps,
            "fewer_steps": self.fewer_steps,
            "faster": self.faster,
            "less_cpu": self.less_cpu,
            "problem_lookups": asdict(self.lookups),
            "train_seconds": self.train_seconds,
        }


@dataclass(frozen=True)
class Promise:
    """A sentence, and whether it was true."""

    text: str
    kept: bool


FEWER_STEPS = 1.3
NOISE = 4.0
"""How many standard errors two means of one distribution may differ by chance."""


def promises(epochs: list[Epoch]) -> list[Promise]:
    """Returns the promises, checked on this run. Needs two epochs."""
    first, second = epochs[0].with_drafts.tokens_per_step, epochs[1].with_drafts.tokens_per_step
    least = min(epoch.fewer_steps for epoch in epochs[1:])
    difference, error = reward_difference(epochs)
    counted = Lookups(sum(e.lookups.hit for e in epochs), sum(e.lookups.miss for e in epochs))
    sessions = [epoch.with_drafts.samples for epoch in epochs]
    expected = Lookups(hit=sum(sessions[1:]), miss=sessions[0])
    rise = Promise(f"tokens per step rise from epoch 1 to epoch 2: {first:.2f} -> {second:.2f}", second > first)
    # A draft model drafts in epoch 1, too, and gives way where the server's drafts yield more tokens per time, not per
    # step.
    return [
        *([] if epochs[0].with_drafts.by_drafter else [rise]),
        Promise(
            f"at least {FEWER_STEPS}x fewer decoding steps in every epoch from the second on: {least:.2f}x "
            "(the smaller of request steps and engine steps)",
            least >= FEWER_STEPS,
        ),
        Promise(
            f"rewards unaffected: with drafts minus without {difference:+.3f}, standard error {error:.3f}",
            abs(difference) <= NOISE * error,
        ),
        Promise(
            f"/metrics agree with the run to the unit: {counted.miss} misses (epoch 1: {expected.miss} requests), "
            f"{counted.hit} hits (later epochs: {expected.hit} requests)",
            counted == expected and epochs[0].lookups.hit == 0,
        ),
    ]


def reward_difference(epochs: list[Epoch]) -> tuple[float, float]:
    """Returns the mean reward with drafts minus without, and its standard error from the spread within each group."""
    difference = variance = 0.0
    groups = 0
    for epoch in epochs:
        for with_drafts, without in zip(epoch.with_drafts.rewards, epoch.without.rewards, strict=True):
            groups += 1
            for rewards, sign in ((with_drafts, 1.0), (without, -1.0)):
                mean = sum(rewards) / len(rewards)
                difference += sign * mean
                variance += sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1) / len(rewards)
    return difference / groups, math.sqrt(variance) / groups


def save(epochs: list[Epoch], checked: list[Promise], path: Path) -> None:
    """Writes the whole table and the promises as JSON."""
    content = {"epochs": [epoch.as_json() for epoch in epochs], "promises": [asdict(promise) for promise in checked]}
    path.write_text(json.dumps(content, indent=2) + "\n")
