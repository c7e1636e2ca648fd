"""The options and results of a replay, from which its tables, plot and JSON are made."""

from dataclasses import dataclass

from histospec.replay.arctic import Peer
from histospec.replay.cases import Case
from histospec.replay.scores import Score

MOST_SHOWN = 4  # costs that a figure can show distinctly


@dataclass(frozen=True)
class Options:
    """How to replay. The options and the file determine every figure.

    Attributes:
        mode: "hist" or "all"; with "all", the visit's other responses are known before the target begins.
        limit: number of problems to draw, 0 for all.
        seed: of the draw.
        costs: verification costs, one pass each.
        max_tokens: maximum tokens of a draft.
        max_response: maximum tokens of a replayed response; the rest is cut.
        epochs: number of newest epochs to score one by one.
        siblings: numbers of siblings that run at the same time, None for all; one row of the siblings table each.
        history: whether the rows of that table know earlier epochs; one row each.
        compare: whether Arctic also drafts for the headline's cases.

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
        """Returns the costs that get details: of a long sweep the lowest, the middle and the highest."""
        if len(self.costs) <= MOST_SHOWN:
            return self.costs
        ordered = sorted(self.costs)
        return ordered[0], ordered[len(ordered) // 2], ordered[-1]


@dataclass(frozen=True)
class Visit:
    """Cases that are replayed together, and their scores.

    Attributes:
        epoch: the visit of the cases; None for each problem's last visit.
        cases: one per problem that had this visit and a history.
        scores: one per cost; epochs before the last have only the shown costs.

    """

    epoch: int | None
    cases: tuple[Case, ...]
    scores: tuple[Score, ...]

    def at(self, cost: float) -> Score:
        """Returns the score at one of the costs."""
        return next(score for score in self.scores if score.verify_cost == cost)


@dataclass(frozen=True)
class Group:
    """The last visit with siblings that run at the same time as the target.

    Attributes:
        asked: requested number of siblings, None for all.
        history: whether earlier epochs are known.
        cases: the headline's problems.
        scores: in the order of the shown costs.

    """

    asked: int | None
    history: bool
    cases: tuple[Case, ...]
    scores: tuple[Score, ...]

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
