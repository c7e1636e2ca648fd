"""How the client comes back to a shard after an outage: whether to ask it (breaker), and how much to send (window).

The breaker, after a few failures in a row, stops asking a shard, and tries again at intervals::

    closed ──(failures in a row)──► open ──(cool-down over: one try)──► trying ──(success)──► closed
                                     ▲                                    │
                                     └──────(failure: longer cool-down)───┘

If the shard is connected, a try is a step; otherwise it is a connection. A connection closes the breaker, but a shard
that fails again before it has answered a step gets a longer cool-down.

After an outage megabytes wait: sessions to open, finished responses to commit. The server applies the messages of a
stream in order, so a step's drafts follow everything that was sent before and is not applied yet. These bytes are
*ahead* of the step, and a window limits them, so that drafts still arrive in time::

    the stream ended                             ──► a window of what most servers apply within a deadline
    a step was late, with bytes ahead            ──► half of those bytes
    a step was answered early, with much ahead   ──► the window grows by a part of itself

Neither reads a clock: the caller passes the time.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from histospec.client.config import Breaker

UNBOUNDED = 1 << 62
RATE = 6 << 20
"""Bytes that an unknown server is assumed to apply per second: half of what a server with one core applied."""
LEAST = 16 << 10
"""Bytes: the smallest window."""

State = Literal["closed", "open", "trying"]


class CircuitBreaker:
    """The breaker of one shard. Not thread-safe; its owner locks."""

    def __init__(self, config: Breaker) -> None:
        self.state: State = "closed"
        self._config = config
        self._failures = 0
        self._answered = True  # whether it answered a step since it was connected
        self._cooldown = config.cooldown
        self._retry_at = 0.0

    def allows(self, now: float) -> bool:
        """Returns whether to ask the shard now. After a cool-down, True starts a try; later calls await its result."""
        if self.state == "closed":
            return True
        if now < self._retry_at:
            return False
        # If the result of this try is never reported, another try is due after another cool-down.
        self.state = "trying"
        self._retry_at = now + self._cooldown
        return True

    def success(self) -> None:
        """Notes that the shard answered in time."""
        self.state, self._failures, self._answered, self._cooldown = "closed", 0, True, self._config.cooldown

    def connected(self) -> None:
        """Notes that the shard is connected again."""
        self.state, self._failures, self._answered = "closed", 0, False

    def failure(self, now: float, soon: bool = False, garbled: bool = False) -> None:
        """Notes that the shard did not answer in time.

        Args:
            now: on the monotonic clock.
            soon: the next try comes after at most `Breaker.reconnect`.
            garbled: it answered what cannot be true. The breaker opens at once: a further answer would be no better.
        """
        self._failures += 1
        if garbled:
            self._failures, self._answered = max(self._failures, self._config.failures), False
        longest = min(self._config.reconnect, self._config.cooldown_max) if soon else self._config.cooldown_max
        jitter = 1 + self._config.jitter * random.random()
        if self.state == "open":
            if soon:
                self._retry_at = min(self._retry_at, now + longest * jitter)
            return
        if self.state == "closed" and self._failures < self._config.failures:
            return
        if self.state == "trying" or not (self._answered or soon):
            self._cooldown = min(2 * self._cooldown, longest)
        self.state = "open"
        self._retry_at = now + self._cooldown * jitter


class SendWindow:
    """How many bytes of one kind may be ahead of a step. Unlimited at first, until a stream ends or a step is late.

    Args:
        deadline: seconds that a step may take.
        soon: an answer within so many seconds makes the window grow.
        growth: the part of itself by which the window grows. Each growth may make a step late, so bytes that can wait
            for long have a small one.
    """

    def __init__(self, deadline: float, soon: float, growth: float) -> None:
        self.size = UNBOUNDED
        """Bytes that may be ahead."""
        self._soon = soon
        self._growth = growth
        self._careful = max(LEAST, int(RATE * deadline))

    def reset(self) -> None:
        """Shrinks the window after the stream ended: the next stream may reach a server that has just started."""
        self.size = min(self.size, self._careful)

    def answered(self, seconds: float, ahead: int, more: bool) -> None:
        """Grows the window after an early answer with `ahead` bytes ahead of the step. `more`: others still wait."""
        if self.size < UNBOUNDED and seconds <= self._soon and (4 * ahead >= self.size or not more):
            self.size = min(self.size + int(self._growth * self.size), UNBOUNDED)

    def late(self, ahead: int) -> None:
        """Shrinks the window after a late step with `ahead` bytes ahead of it."""
        if ahead:
            self.size = max(LEAST, min(self.size, self._careful, ahead // 2))


@dataclass
class InFlight:
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
