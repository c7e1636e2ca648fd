"""The options and results of a replay, from which its tables and plot are made, and the results as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from histospec.replay.arctic import Peer
from histospec.replay.scores import Case, Score, deciles

MOST_SHOWN = 4  # costs that a figure can show distinctly


@dataclass(frozen=True)
class Options:
    """How to replay: the options of the command, which explains them. They and the file determine every figure."""

    mode: str
    limit: int  # 0 for all
    seed: int
    costs: tuple[float, ...]
    max_tokens: int
    max_response: int
    epochs: int
    siblings: tuple[int | None, ...] = ()  # None for all; one row of the siblings table each
    history: tuple[bool, ...] = (False, True)  # whether the rows of that table know earlier epochs
    compare: bool = False

    def shown(self) -> tuple[float, ...]:
        """Returns the costs that get details: of a long sweep the lowest, the middle and the highest."""
        if len(self.costs) <= MOST_SHOWN:
            return self.costs
        ordered = sorted(self.costs)
        return ordered[0], ordered[len(ordered) // 2], ordered[-1]


@dataclass(frozen=True)
class Scored:
    """Cases that are replayed together, and their scores: one per cost, or per shown cost."""

    cases: tuple[Case, ...]
    scores: tuple[Score, ...]

    def at(self, cost: float) -> Score:
        """Returns the score at one of the costs."""
        return next(score for score in self.scores if score.verify_cost == cost)


@dataclass(frozen=True)
class Visit(Scored):
    """One case per problem that had this visit and a history. Epochs before the last have only the shown costs."""

    epoch: int | None
    """None: each problem's last visit."""


@dataclass(frozen=True)
class Group(Scored):
    """The headline's problems at their last visit, with siblings that run at the same time as the target."""

    asked: int | None
    """Requested number of siblings, None for all."""
    history: bool
    """Whether earlier epochs are known."""

    def running(self) -> float:
        """The mean number of siblings that ran with a target."""
        return sum(len(case.siblings) for case in self.cases) / len(self.cases)

    def smaller(self) -> int:
        """The number of problems whose group has fewer siblings than requested."""
        return sum(len(case.siblings) < (self.asked or 0) for case in self.cases)


@dataclass(frozen=True)
class Replay:
    """The result: the headline over every problem's last visit, and each epoch, oldest first.

    Attributes:
        problems: number of problems in the file.
        usable: number of problems with a history at their last visit; the cases are drawn from these.
        last: the headline.
        epochs: the visits that could be scored.
        groups: the siblings table, row by row: without history, then with it.
        peer: the other drafter, if requested.

    """

    problems: int
    usable: int
    last: Visit
    epochs: tuple[Visit, ...]
    groups: tuple[Group, ...] = ()
    peer: Peer | None = None

    def is_last(self, visit: Visit) -> bool:
        """Returns whether the visit is the last one of every problem, so that its figures are the headline's."""
        return visit.scores is self.last.scores


def as_json(result: Replay, options: Options, file: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns every figure of the replay, and the assumptions about its files; docs/replay.md explains the fields."""
    figures: dict[str, Any] = {
        "file": file,
        "notes": list(notes),
        "mode": options.mode,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "max_response": options.max_response,
        "problems": result.problems,
        "problems_with_history": result.usable,
        "last_visit": _visit(result.last, options),
        "epochs": [{"epoch": visit.epoch, **_visit(visit, options)} for visit in result.epochs],
    }
    if result.groups:
        figures["siblings"] = [_group(group, options) for group in result.groups]
    if result.peer is not None:
        figures["compare"] = {"arctic": _peer(result.peer, result.last)}
    return figures


def _visit(visit: Visit, options: Options) -> dict[str, Any]:
    return {
        "problems": len(visit.cases),
        "history_tokens": sum(case.history_tokens() for case in visit.cases),
        "target_tokens": sum(case.target_tokens() for case in visit.cases),
        "costs": [_score(score, options) for score in visit.scores],
    }


def _score(score: Score, options: Options) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "verify_cost": score.verify_cost,
        "steps": score.steps,
        "drafted": score.drafted,
        "accepted": score.accepted,
        "tokens_per_step": score.tokens_a_step(),
        "drafted_per_step": score.drafted_a_step(),
        "speed_up": score.speed_up(),
        "speed_up_95": list(score.interval()),
        "speed_up_at": {f"{cost:g}": score.speed_up(cost) for cost in options.costs},
        "calibration": [asdict(decile) for decile in deciles(score.verified)],
    }
    if score.sources:
        figures["sources"] = {name: dict(counts) for name, counts in score.sources.items()}
    return figures


def _group(group: Group, options: Options) -> dict[str, Any]:
    return {
        "siblings": "all" if group.asked is None else group.asked,
        "history": group.history,
        "running": group.running(),
        "smaller_groups": group.smaller(),
        "costs": [
            {**_score(score, options), "group_tokens_per_step": score.group_tokens_a_step()} for score in group.scores
        ],
    }


def _peer(peer: Peer, headline: Visit) -> dict[str, Any]:
    costs = []
    for score in headline.scores:
        settings, best = peer.best(score.verify_cost)
        costs.append(
            {
                "verify_cost": score.verify_cost,
                "settings": settings._asdict(),
                "tokens_per_step": best.tokens_a_step(),
                "drafted_per_step": best.drafted_a_step(),
                "speed_up": best.speed_up(score.verify_cost),
                "gain": score.speed_up() / best.speed_up(score.verify_cost) - 1,
            }
        )
    return {"name": peer.name, "costs": costs}
