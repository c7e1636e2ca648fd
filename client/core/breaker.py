"""A circuit breaker: after a few failures in a row, the client stops waiting for a shard and tries again at intervals.

::

    closed ──(failures in a row)──► open ──(cool-down over: one try)──► trying ──(success)──► closed
                                     ▲                                    │
                                     └──────(failure: longer cool-down)───┘

If the shard is connected, a try is a step; otherwise it is a connection. A connection closes the breaker, but a shard
that fails again before it has answered a step gets a longer cool-down.

The breaker reads no clock: the caller passes the time.
"""

import random
from typing import Literal

from histospec.client.config import Breaker

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

    def failure(self, now: float, soon: bool = False) -> None:
        """Notes that the shard did not answer in time. `soon`: the next try comes after at most `Breaker.reconnect`."""
        self._failures += 1
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
