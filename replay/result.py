"""What a replay was asked for, and what it gave: what its tables, plot and JSON are made from."""

from dataclasses import dataclass

from histospec.replay.arctic import Peer
from histospec.replay.cases import Case
from histospec.replay.scores import Score

MOST_SHOWN = 4  # costs that a figure can tell apart


@dataclass(frozen=True)
class Options:
    """How to replay; every figure follows from these and the file.

    Attributes:
        mode: "hist" or "all", whether the visit's other responses are known before the target begins.
        limit: how many problems are drawn, 0 for all.
        seed: of the draw.
        costs: verification costs, one pass each.
        max_tokens: the longest draft.
        max_response: responses that are written again are cut to this many tokens.
        epochs: how many of the newest epochs are scored one by one.
        siblings: how many siblings run beside the target, None for all; one row of the siblings table each.
        history: whether the rows of that table know earlier epochs; one row each.
        compare: whether Arctic drafts for the headline's cases, too.

    """

    mode: str
    limit: int
    seed: int
    costs: tuple[float, ...]
    max_tokens: int
    max_response: int
    epochs: int
    siblings: tuple[int | None, ...] = ()
    history: tuple[bool, ...] = (False, True)
    compare: bool = False

    def shown(self) -> tuple[float, ...]:
        """The costs that get details: of a long sweep the lowest, the middle and the highest."""
        if len(self.costs) <= MOST_SHOWN:
            return self.costs
        ordered = sorted(self.costs)
        return ordered[0], ordered[len(ordered) // 2], ordered[-1]


@dataclass(frozen=True)
class Visit:
    """Cases that are replayed together, and what they gave.

    Attributes:
        epoch: the visit that the cases are taken from; None for each problem's last visit.
        cases: one a problem that was visited then and had something to know.
        scores: one a cost; epochs that are not the last have the shown costs only.

    """

    epoch: int | None
    cases: tuple[Case, ...]
    scores: tuple[Score, ...]

    def at(self, cost: float) -> Score:
        """The score at one of the costs."""
        return next(score for score in self.scores if score.verify_cost == cost)


@dataclass(frozen=True)
class Group:
    """The last visit with siblings that run beside the target.

    Attributes:
        asked: how many siblings were asked for, None for all.
        history: whether earlier epochs are known.
        cases: the headline's problems.
        scores: in the order of the shown costs.

    """

    asked: int | None
    history: bool
    cases: tuple[Case, ...]
    scores: tuple[Score, ...]

    def running(self) -> float:
        """Siblings that ran beside a target, the mean."""
        return sum(len(case.siblings) for case in self.cases) / len(self.cases)

    def smaller(self) -> int:
        """Problems whose group has fewer siblings than were asked for."""
        return sum(len(case.siblings) < (self.asked or 0) for case in self.cases)


@dataclass(frozen=True)
class Replay:
    """The result: the headline over every problem's last visit, and the epochs one by one, oldest first.

    Attributes:
        problems: how many the file holds.
        usable: how many of them have history at their last visit; the cases are drawn from these.
        last: the headline.
        epochs: the visits that could be scored.
        groups: the siblings table, row by row: without history, then with it.
        peer: the other drafter, if one was asked for.

    """

    problems: int
    usable: int
    last: Visit
    epochs: tuple[Visit, ...]
    groups: tuple[Group, ...] = ()
    peer: Peer | None = None

    def is_last(self, visit: Visit) -> bool:
        """Whether the visit is every problem's last one, so that its figures are the headline's."""
        return visit.scores is self.last.scores
