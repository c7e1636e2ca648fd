"""A circuit breaker: after a few failures in a row, stop waiting for a shard, and try again now and then.

::

    closed ──(failures in a row)──► open ──(cool-down over: one try)──► trying ──(success)──► closed
                                     ▲                                    │
                                     └──────(failure: longer cool-down)───┘

A try is a step where the shard is connected, and the connection where it is not. A connection closes the breaker, but a
shard that fails again before it has answered a step has a longer cool-down.

No clock in here: the caller says what time it is.
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
        self._answered = True  # a step, since it was connected
        self._cooldown = config.cooldown
        self._retry_at = 0.0

    def allows(self, now: float) -> bool:
        """Whether to ask the shard now. Having said yes after a cool-down, it waits for what comes of it."""
        if self.state == "closed":
            return True
        if now < self._retry_at:
            return False
        # Should nobody ever tell what came of this try, another one is due after another cool-down.
        self.state = "trying"
        self._retry_at = now + self._cooldown
        return True

    def success(self) -> None:
        """The shard answered in time."""
        self.state, self._failures, self._answered, self._cooldown = "closed", 0, True, self._config.cooldown

    def connected(self) -> None:
        """The shard is there again."""
        self.state, self._failures, self._answered = "closed", 0, False

    def failure(self, now: float, soon: bool = False) -> None:
        """The shard did not answer, or not in time; `soon`: the next try comes after `Breaker.reconnect` at most."""
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
