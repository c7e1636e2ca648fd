"""How much of what waits goes with a step, so that its drafts are in time all the same.

After an outage megabytes wait: sessions to open, finished responses to commit. The server applies the messages of a
stream in their order, so a step's drafts come after everything that was sent before and is not applied yet. These
bytes are *ahead* of the step.

::

    the stream ended                             ──► room for what most servers apply within a deadline
    a step was late, with something ahead        ──► room for half of that
    a step was answered soon, with much ahead    ──► a part of the room more
"""

from collections import deque
from dataclasses import dataclass, field

UNBOUNDED = 1 << 62
RATE = 6 << 20
"""Bytes that a server applies in a second, where nothing is known of it: half of what one took that had a core."""
LEAST = 16 << 10
"""Bytes."""


class Pace:
    """The room for one kind of bytes ahead of a step. Without bound at first, as where the server is well.

    Args:
        deadline: seconds that a step may take.
        soon: of these, what an answer may take so that the room grows.
        growth: by which part of itself. What waits for long grows slowly: each attempt at more may make a step late.

    """

    def __init__(self, deadline: float, soon: float, growth: float) -> None:
        self.room = UNBOUNDED
        """Bytes that may be ahead."""
        self._soon = soon
        self._growth = growth
        self._careful = max(LEAST, int(RATE * deadline))

    def begin_again(self) -> None:
        """The stream ended: the next one may reach a server that has just started."""
        self.room = min(self.room, self._careful)

    def answered(self, seconds: float, ahead: int, more: bool) -> None:
        """A step was answered in time with so many bytes ahead of it; whether more of them wait."""
        if self.room < UNBOUNDED and seconds <= self._soon and (4 * ahead >= self.room or not more):
            self.room = min(self.room + int(self._growth * self.room), UNBOUNDED)

    def late(self, ahead: int) -> None:
        """A step was late with so many bytes ahead of it."""
        if ahead:
            self.room = max(LEAST, min(self.room, self._careful, ahead // 2))


@dataclass
class Flow:
    """What is on its way on one stream, in bytes."""

    opens: int = 0
    """Of sessions to open, not applied as far as answers tell ..."""
    commits: int = 0
    """... and of responses."""
    unacknowledged: int = 0
    """Of responses, applied or not."""
    _unapplied: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Sequence, opens, commits."""
    _unstored: dict[int, int] = field(default_factory=dict)
    """By sequence."""

    def sent(self, sequence: int, opens: int, commits: int) -> None:
        """A message is on its way."""
        self._unapplied.append((sequence, opens, commits))
        self.opens += opens
        self.commits += commits
        if commits:
            self._unstored[sequence] = commits
            self.unacknowledged += commits

    def answered(self, sequence: int) -> None:
        """The server has applied this message, and so all before it."""
        while self._unapplied and self._unapplied[0][0] <= sequence:
            _, opens, commits = self._unapplied.popleft()
            self.opens -= opens
            self.commits -= commits
        self.unacknowledged -= self._unstored.pop(sequence, 0)
