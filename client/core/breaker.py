"""A circuit breaker: after a few failures in a row, stop waiting for a shard, and try again now and then.

::

    closed ──(failures in a row)──► open ──(cool-down over: one try)──► trying ──(success)──► closed
                                     ▲                                    │
                                     └──────(failure: longer cool-down)───┘

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
        self.state, self._failures, self._cooldown = "closed", 0, self._config.cooldown

    def failure(self, now: float) -> None:
        """The shard did not answer, or not in time."""
        self._failures += 1
        if self.state == "open" or (self.state == "closed" and self._failures < self._config.failures):
            return
        if self.state == "trying":
            self._cooldown = min(2 * self._cooldown, self._config.cooldown_max)
        self.state = "open"
        self._retry_at = now + self._cooldown * (1 + self._config.jitter * random.random())
