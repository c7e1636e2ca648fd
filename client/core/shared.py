"""What the shards of one client share: its configuration and counters, and the lines that wait for the log."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from histospec.client.config import Config
from histospec.client.core.commits import Commits
from histospec.client.core.session import Session
from histospec.client.values import Stats

log = logging.getLogger("histospec.client")


@dataclass(eq=False)
class Shared:
    """See the module. Not thread-safe, except for `write_log`; the core locks."""

    config: Config
    stats: Stats
    sessions: Mapping[int, Session]
    """The open sessions, by number; a shard marks those that it refuses."""
    commits: Commits
    move: Callable[[Session], None]
    """Gives an open session whose prompt has changed to the shard that owns it."""
    explain: Callable[[Any], None]
    """Logs why a shard does not answer."""
    closed: bool = False
    """Whether the client sends nothing any more."""
    lines: deque[Callable[[], None]] = field(default_factory=deque)
    """Log calls that wait: a line may wait for a terminal, so none is written under the core's lock."""

    def warn(self, line: str, *values: object) -> None:
        """Logs a warning after the core's lock is released."""
        self.lines.append(partial(log.warning, line, *values))

    def inform(self, line: str, *values: object) -> None:
        """Logs something that is not wrong, as `warn` does."""
        self.lines.append(partial(log.info, line, *values))

    def explain_later(self, shard: Any) -> None:
        """Has `explain` log why a shard does not answer, as `warn` does."""
        self.lines.append(partial(self.explain, shard))

    def write_log(self) -> None:
        """Logs the lines that wait. Called without the lock."""
        while self.lines:
            with contextlib.suppress(IndexError):  # another thread logs it
                self.lines.popleft()()
