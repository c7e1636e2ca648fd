"""Refusals that name a limit: a server writes these sentences, and a client cuts its messages to the limit in them."""

import re
from collections.abc import Iterator


def too_many(field: str, number: int, limit: int) -> str:
    """A message has more parts (opens, closes, step.sessions, responses) than the server takes in one."""
    return f"{field}: {number} are more than the limit of {limit}"


def draft_too_long(wanted: int, limit: int) -> str:
    """A step asks for longer drafts than the server gives."""
    return f"step.max_tokens: {wanted} is over the limit of {limit}"


_NAMED = (
    ("batch", re.compile(r"(?:opens|closes|step\.sessions|responses): \d+ are more than the limit of (\d+)")),
    ("message", re.compile(r"[Rr]eceived message larger than max \(\d+ vs\. (\d+)\)")),  # gRPC's own sentence
    ("draft", re.compile(r"step\.max_tokens: \d+ is over the limit of (\d+)")),
)


def limits_in(details: str) -> Iterator[tuple[str, int]]:
    """What the text of a status says of limits: the key in `names.LIMITS`, and the limit."""
    for name, pattern in _NAMED:
        if match := pattern.search(details):
            yield name, int(match[1])
