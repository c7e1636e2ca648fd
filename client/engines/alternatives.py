"""The alternatives of a running request's sampled tokens, until its response is committed."""

from typing import NamedTuple

import numpy as np

from histospec.protocol.alternatives import joined


class Step(NamedTuple):
    """The alternatives of the tokens that a request got in one step."""

    counts: bytes
    """uint8, one per token."""
    groups: bytes
    """As in `histospec.protocol.alternatives`."""


class Gathered:
    """The alternatives of a running request, step by step."""

    def __init__(self) -> None:
        self._counts = bytearray()
        self._groups = bytearray()

    def put(self, start: int, step: Step) -> None:
        """Adds those of the tokens from `start` on, in place of those that are there: an engine may discard tokens."""
        self._cut(start)
        self._counts.extend(bytes(start - len(self._counts)))
        self._counts += step.counts
        self._groups += step.groups

    def packed(self, before: int, tokens: int) -> bytes | None:
        """Returns those of a response of `tokens` tokens, of which the request did not sample the first `before`."""
        self._cut(tokens - before)
        if not self._groups:
            return None
        counts = np.zeros(tokens, np.uint8)
        counts[before : before + len(self._counts)] = self._counts
        return joined(counts, bytes(self._groups))

    def _cut(self, tokens: int) -> None:
        gone = self._counts[max(tokens, 0) :]
        if size := sum(1 + 4 * count for count in gone if count):
            del self._groups[-size:]
        del self._counts[max(tokens, 0) :]
