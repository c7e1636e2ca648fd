"""Groups responses that were recorded one by one into problems with visits.

Responses with the same id belong to one problem; without ids, those with the same prompt do. If records name no epoch,
their order determines it: adjacent records of a problem are one visit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from histospec.replay.recordings.values import Problem, RecordedResponse, RecordingError, Row, Turn, common

Key = tuple[object, object]

BY_ORDER = "not recorded, so the n-th visit of a problem is epoch n; adjacent records of a problem are one visit"


def problems(rows: Sequence[Row]) -> list[Problem]:
    """Returns the problems in the order of their first records.

    Raises:
        RecordingError: some rows name an epoch and some do not, or the prompts of one id share no prefix.

    """
    _all_or_none(rows)
    members: dict[Key, list[Row]] = {}
    for row in _by_order(rows) if rows and rows[0].epoch is None else rows:
        members.setdefault(_key(row), []).append(row)
    return [_problem(group) for group in members.values()]


def _key(row: Row) -> Key:
    return row.namespace, row.prompt.tobytes() if row.problem is None else row.problem


def _all_or_none(rows: Sequence[Row]) -> None:
    without = next((row for row in rows if row.epoch is None), None)
    named = next((row for row in rows if row.epoch is not None), None)
    if without is not None and named is not None:
        raise RecordingError(
            f"{without.place}: epoch: missing, while {named.place} has one; give all records an epoch, or none"
        )


def _by_order(rows: Iterable[Row]) -> Iterable[Row]:
    """Returns the rows with an epoch: the number of the visit to their problem, from 0."""
    visits: dict[Key, int] = {}
    last: object = None
    for row in rows:
        key = _key(row)
        place = key, str(row.group)
        if place != last:
            visits[key] = visits.get(key, -1) + 1
        last = place
        yield replace(row, epoch=visits[key])


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
