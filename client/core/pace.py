"""Limits how many waiting bytes go out with a step, so that its drafts still arrive in time.

After an outage megabytes wait: sessions to open, finished responses to commit. The server applies the messages of a
stream in order, so a step's drafts follow everything that was sent before and is not applied yet. These bytes are
*ahead* of the step.

::

    the stream ended                             ──► room for what most servers apply within a deadline
    a step was late, with bytes ahead            ──► room for half of those bytes
    a step was answered early, with much ahead   ──► the room grows by a part of itself
"""

from collections import deque
from dataclasses import dataclass, field

UNBOUNDED = 1 << 62
RATE = 6 << 20
"""Bytes that an unknown server is assumed to apply per second: half of what a server with one core applied."""
LEAST = 16 << 10
"""Bytes: the smallest room."""


class Pace:
    """The room for one kind of bytes ahead of a step. Unlimited at first, until a stream ends or a step is late.

    Args:
        deadline: seconds that a step may take.
        soon: an answer within so many seconds makes the room grow.
        growth: the part of itself by which the room grows. Each growth may make a step late, so bytes that can wait
            for long have a small one.

    """

    def __init__(self, deadline: float, soon: float, growth: float) -> None:
        self.room = UNBOUNDED
        """Bytes that may be ahead."""
        self._soon = soon
        self._growth = growth
        self._careful = max(LEAST, int(RATE * deadline))

    def begin_again(self) -> None:
        """Reduces the room after the stream ended: the next stream may reach a server that has just started."""
        self.room = min(self.room, self._careful)

    def answered(self, seconds: float, ahead: int, more: bool) -> None:
        """Lets the room grow after an early answer with `ahead` bytes ahead of the step. `more`: others still wait."""
        if self.room < UNBOUNDED and seconds <= self._soon and (4 * ahead >= self.room or not more):
            self.room = min(self.room + int(self._growth * self.room), UNBOUNDED)

    def late(self, ahead: int) -> None:
        """Reduces the room after a late step with `ahead` bytes ahead of it."""
        if ahead:
            self.room = max(LEAST, min(self.room, self._careful, ahead // 2))


@dataclass
class Flow:
    """The bytes on their way on one stream."""

    opens: int = 0
    """Bytes of sessions to open that no answer has reported as applied."""
    commits: int = 0
    """Bytes of responses that no answer has reported as applied."""
    unacknowledged: int = 0
    """Bytes of responses that the server has not acknowledged."""
    _unapplied: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Sequence, opens, commits."""
    _unstored: dict[int, int] = field(default_factory=dict)
    """Bytes of unacknowledged responses, by sequence."""

    def sent(self, sequence: int, opens: int, commits: int) -> None:
        """Adds a message that is on its way."""
        self._unapplied.append((sequence, opens, commits))
        self.opens += opens
        self.commits += commits
        if commits:
            self._unstored[sequence] = commits
            self.unacknowledged += commits

    def answered(self, sequence: int) -> None:
        """Notes that the server has applied this message, and so all before it."""
        while self._unapplied and self._unapplied[0][0] <= sequence:
            _, opens, commits = self._unapplied.popleft()
            self.opens -= opens
            self.commits -= commits
        self.unacknowledged -= self._unstored.pop(sequence, 0)
