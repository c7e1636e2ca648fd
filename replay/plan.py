"""The passes of a replay, and their cases.

The headline replays every problem at its last visit, at every cost. The passes by epoch replay the same problems at
each visit, with only the history before it, which shows how fast history begins to pay. On request, further passes
replay the last visit with siblings that run at the same time, and the headline's cases with another drafter.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rich.progress import Progress

from histospec.replay import arctic as replay_arctic
from histospec.replay import scores as replay_scores
from histospec.replay.cases import Case, case_at, group_at
from histospec.replay.recordings import Problem, RecordingError
from histospec.replay.result import Group, Options, Replay, Visit
from histospec.replay.scores import Score


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

    visits = [Visit(epoch, planned.cases, run(planned)) for epoch, planned in epochs.items()]
    headline = Visit(None, last.cases, run(last))
    if shared is not None:
        visits.append(Visit(next(iter(same)), last.cases, headline.scores))
    scores = {key: run(row) for key, row in rows.items()}
    table = tuple(
        Group(asked, history, row.cases, scores[history, _who_runs(row)]) for (asked, history), row in groups.items()
    )
    peer = replay_arctic.replay(last.cases, options.max_tokens, watch("Arctic")) if options.compare else None
    return Replay(len(problems), len(usable), headline, tuple(visits), table, peer)


def _epochs(problems: Iterable[Problem], options: Options) -> dict[int, _Pass]:
    """Returns the newest epochs that can be scored, oldest first."""
    problems = list(problems)
    passes = {}
    for epoch in sorted({epoch for problem in problems for epoch in problem.epochs()}):
        cases = tuple(case for problem in problems if (case := _case(problem, epoch, options)) is not None)
        if any(case.target_tokens() for case in cases):
            passes[epoch] = _Pass(f"epoch {epoch}", cases, options.shown())
    return dict(list(passes.items())[-options.epochs :]) if options.epochs else {}


def _groups(problems: Iterable[Problem], options: Options) -> dict[tuple[int | None, bool], _Pass]:
    """Returns the rows of the siblings table, by the number of siblings and whether earlier epochs are known."""
    problems = list(problems)
    passes = {}
    for history in options.history:
        for asked in options.siblings:
            cases = tuple(
                group_at(
                    problem, problem.epochs()[-1], siblings=asked, history=history, max_response=options.max_response
                )
                for problem in problems
            )
            name = f"{'all' if asked is None else asked} siblings {'with' if history else 'without'} history"
            passes[asked, history] = _Pass(name, cases, options.shown())
    return passes


def _case(problem: Problem, epoch: int | None, options: Options) -> Case | None:
    visit = problem.epochs()[-1] if epoch is None else epoch
    return case_at(problem, visit, siblings=options.mode == "all", max_response=options.max_response)


def _who_runs(row: _Pass) -> tuple[int, ...]:
    return tuple(len(case.siblings) for case in row.cases)


def _sessions(case: Case) -> int:
    return 1 + len(case.siblings)
