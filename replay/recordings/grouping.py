"""Groups responses that were recorded one by one into problems with visits.

Responses with the same id belong to one problem; those without an id do if they have the same prompt. If records name
no epoch, each group is a visit. Without groups, too, all responses of a problem are one visit: rollouts are often
recorded as they complete, so their order does not tell when the policy changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from histospec.replay.recordings.values import Problem, RecordedResponse, RecordingError, Row, Turn, common

Key = tuple[object, object]

BY_GROUP = "not recorded, so each group is a visit, in the order of their first records"
NO_EPOCHS = "not recorded, so all responses of a problem are one visit, whatever their order"
UNDATED = (
    "no record has an epoch or a group, and their order does not tell when the policy changed; give each record its "
    "epoch (the training step) or its group (what was sampled together), name your field for it with --fields "
    "epoch=FIELD, put the step into the names of the files (step_3.jsonl), or replay all responses as one visit with "
    "--mode all"
)


def problems(rows: Sequence[Row]) -> list[Problem]:
    """Returns the problems in the order of their first records.

    Raises:
        RecordingError: some rows name an epoch and some do not, or the prompts of one id share no prefix.

    """
    _all_or_none(rows)
    members: dict[Key, list[Row]] = {}
    for row in _by_group(rows) if rows and rows[0].epoch is None else rows:
        members.setdefault(_key(row), []).append(row)
    return [_problem(group) for group in members.values()]


def told_by(rows: Sequence[Row]) -> str:
    """Returns what tells the problems of these rows apart."""
    without = sum(row.problem is None for row in rows)
    if without == len(rows):
        return "prompt"
    return f"id, and by prompt for the {without:,} responses without an id" if without else "id"


def _key(row: Row) -> Key:
    return row.namespace, row.prompt.tobytes() if row.problem is None else str(row.problem)


def _all_or_none(rows: Sequence[Row]) -> None:
    without = next((row for row in rows if row.epoch is None), None)
    named = next((row for row in rows if row.epoch is not None), None)
    if without is not None and named is not None:
        raise RecordingError(
            f"{without.place}: epoch: missing, while {named.place} has one; give all records an epoch, or none"
        )


def _by_group(rows: Iterable[Row]) -> Iterable[Row]:
    """Returns the rows with an epoch: the number of their group among those of its problem, from 0."""
    groups: dict[Key, dict[str, int]] = {}
    for row in rows:
        found = groups.setdefault(_key(row), {})
        yield replace(row, epoch=found.setdefault(str(row.group), len(found)))


def _problem(rows: Sequence[Row]) -> Problem:
    """Returns one problem. If prompts differ, their common prefix is its prompt, and the rest of each is context."""
    first = rows[0]
    shared = len(first.prompt)
    for row in rows[1:]:
        shared = _common(first, row, shared)
    return Problem(first.prompt[:shared], tuple(_response(row, shared) for row in rows))


def _common(first: Row, row: Row, shared: int) -> int:
    """Returns how many of the first `shared` tokens the prompts of two rows have in common."""
    if row.prompt is first.prompt:
        return shared
    same = common(first.prompt[:shared], row.prompt)
    if not same:
        raise RecordingError(
            f"{row.place}: prompt: differs from that of {first.place} at the first token, but both have id "
            f"{row.problem!r}; give each problem its own id, or omit the ids"
        )
    return same


def _response(row: Row, shared: int) -> RecordedResponse:
    assert row.epoch is not None
    rest = (Turn(row.prompt[shared:], False),) if len(row.prompt) > shared else ()
    return RecordedResponse(row.epoch, (*rest, *row.turns), row.group)
