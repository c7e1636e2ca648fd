"""Refusals that name a limit. A server writes these sentences; a client reads the limit and cuts its messages to it."""

import re
from collections.abc import Iterator


def too_many(field: str, number: int, limit: int) -> str:
    """Returns the refusal of a message with too many parts (opens, closes, step.sessions, responses)."""
    return f"{field}: {number} are more than the limit of {limit}"


def draft_too_long(wanted: int, limit: int) -> str:
    """Returns the refusal of a step that asks for longer drafts than the server gives."""
    return f"step.max_tokens: {wanted} is over the limit of {limit}"


_NAMED = (
    ("batch", re.compile(r"(?:opens|closes|step\.sessions|responses): \d+ are more than the limit of (\d{1,18})")),
    ("message", re.compile(r"[Rr]eceived message larger than max \(\d+ vs\. (\d{1,18})\)")),  # gRPC's own sentence
    ("draft", re.compile(r"step\.max_tokens: \d+ is over the limit of (\d{1,18})")),
)


def limits_in(details: str) -> Iterator[tuple[str, int]]:
    """Yields the limits in the text of a status: the key in `names.LIMITS`, and the limit."""
    for name, pattern in _NAMED:
        if match := pattern.search(details):
            yield name, int(match[1])
