"""The passes of a replay, and their cases.

The headline replays every problem at its last visit, at every cost. The passes by epoch replay the same problems at
each visit, with only the history before it, which shows how fast history begins to pay. On request, further passes
replay the last visit with siblings that run at the same time, and the headline's cases with another drafter.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.progress import Progress

from histospec.replay import arctic as replay_arctic
from histospec.replay import scores as replay_scores
from histospec.replay.recordings import Problem, RecordingError
from histospec.replay.result import Group, Options, Replay, Visit
from histospec.replay.scores import Case, Score


class _Pass(NamedTuple):
    """Cases to replay once at each of the costs."""

    name: str
    cases: tuple[Case, ...]
    costs: tuple[float, ...]

    def sessions(self) -> int:
        return len(self.costs) * sum(map(_sessions, self.cases))


def replay(problems: Sequence[Problem], options: Options, progress: Progress) -> Replay:
    """Scores the problems as the options say. The progress bar counts sessions.

    Raises:
        RecordingError: no problem has a history at its last visit.

    """
    usable = [(problem, case) for problem in problems if (case := _case(problem, None, options)) is not None]
    order = np.random.default_rng(options.seed).permutation(len(usable))
    drawn = [usable[i] for i in order[: options.limit or None]]
    if not any(case.target_tokens() for _, case in drawn):
        raise RecordingError(
            "no problem has a generated response with an earlier one to draft from: record at least two epochs"
            + ("" if options.mode == "all" else ", or count the responses of the same visit with --mode all")
        )
    chosen = [problem for problem, _ in drawn]
    last = _Pass("last visit", tuple(case for _, case in drawn), options.costs)
    epochs = _epochs(chosen, options)
    # If every problem has its last visit at the same epoch, that epoch is the headline: one pass serves both.
    same = {problem.epochs()[-1] for problem in chosen}
    shared = epochs.pop(next(iter(same)), None) if len(same) == 1 else None
    groups = _groups(chosen, options)
    # Rows share one pass if no group has enough siblings to tell them apart.
    rows = {(history, _who_runs(row)): row for (_, history), row in groups.items()}

    total = sum(planned.sessions() for planned in (last, *epochs.values(), *rows.values()))
    if options.compare:
        total += len(replay_arctic.GRID) * len(last.cases)
    bar = progress.add_task("replaying", total=total)

    def watch(name: str) -> Callable[[Case], None]:
        progress.update(bar, description=f"replaying {name}")
        return lambda case: progress.advance(bar, _sessions(case))

    def run(planned: _Pass) -> tuple[Score, ...]:
        return tuple(
            replay_scores.score(planned.cases, cost, options.max_tokens, watch(f"{planned.name} at cost {cost:g}"))
            for cost in planned.costs
        )

    visits = [Visit(planned.cases, run(planned), epoch) for epoch, planned in epochs.items()]
    headline = Visit(last.cases, run(last), None)
    if shared is not None:
        visits.append(Visit(last.cases, headline.scores, next(iter(same))))
    scores = {key: run(row) for key, row in rows.items()}
    table = tuple(
        Group(row.cases, scores[history, _who_runs(row)], asked, history) for (asked, history), row in groups.items()
    )
    peer = replay_arctic.replay(last.cases, options.max_tokens, watch("Arctic")) if options.compare else None
    return Replay(len(problems), len(usable), headline, tuple(visits), table, peer)


def _epochs(problems: Sequence[Problem], options: Options) -> dict[int, _Pass]:
    """Returns the newest epochs that can be scored, oldest first."""
    passes = {}
    for epoch in sorted({epoch for problem in problems for epoch in problem.epochs()}):
        cases = tuple(case for problem in problems if (case := _case(problem, epoch, options)) is not None)
        if any(case.target_tokens() for case in cases):
            passes[epoch] = _Pass(f"epoch {epoch}", cases, options.shown())
    return dict(list(passes.items())[-options.epochs :]) if options.epochs else {}


def _groups(problems: Sequence[Problem], options: Options) -> dict[tuple[int | None, bool], _Pass]:
    """Returns the rows of the siblings table, by the number of siblings and whether earlier epochs are known."""
    passes = {}
    for history in options.history:
        for asked in options.siblings:
            cases = tuple(
                case_at(problem, problem.epochs()[-1], options.max_response, history=history, running=asked)
                for problem in problems
            )
            name = f"{'all' if asked is None else asked} siblings {'with' if history else 'without'} history"
            passes[asked, history] = _Pass(name, cases, options.shown())
    return passes


def _case(problem: Problem, epoch: int | None, options: Options) -> Case | None:
    """Returns the problem at a visit, None for its last; None if there is no such visit, or nothing to draft from."""
    if epoch is not None and epoch not in problem.epochs():
        return None
    visit = problem.epochs()[-1] if epoch is None else epoch
    case = case_at(problem, visit, options.max_response, finished=options.mode == "all")
    return case if case.history else None


def case_at(
    problem: Problem,
    epoch: int,
    max_response: int,
    *,
    history: bool = True,
    finished: bool = False,
    running: int | None = 0,
) -> Case:
    """Returns the problem at one of its visits, whose first response becomes the target.

    Args:
        problem: the recorded problem.
        epoch: a visit of the problem.
        max_response: maximum tokens of the target and of each sibling; the rest is cut.
        history: whether the drafter knows the responses of earlier visits.
        finished: whether it also knows the visit's other responses, as if they were finished. A run would know less.
        running: how many other members of the target's group run at the same time, None for all; a smaller group gives
            all it has. They appear token by token, as in a run.

    """
    target, *others = [response for response in problem.responses if response.epoch == epoch]
    known = [response for response in problem.responses if history and response.epoch < epoch]
    if finished:
        known += others
    siblings = [response for response in others if response.group == target.group][:running]
    return Case(
        problem.prompt,
        tuple(known),
        target.cut(max_response),
        tuple(sibling.cut(max_response) for sibling in siblings),
    )


def _who_runs(row: _Pass) -> tuple[int, ...]:
    return tuple(len(case.siblings) for case in row.cases)


def _sessions(case: Case) -> int:
    return 1 + len(case.siblings)
