"""Finished responses until they are acknowledged: kept, sent, sent again, and given up.

Belongs to the core, which locks. A response waits at the shard that owns its problem.
"""

import logging
from collections.abc import Iterable, Sequence

from histospec.client.config import Limits
from histospec.client.conversation import Conversation
from histospec.client.membership import Membership
from histospec.client.session import Commit
from histospec.client.shard import ShardState
from histospec.client.values import Stats

log = logging.getLogger("histospec.client")

MAX_ATTEMPTS = 3
"""A response that the server turned down so often is dropped; it would be turned down for ever."""


FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0
"""Seconds until what a store could not take is sent again."""


class Commits:
    """What waits, within `limits`; what becomes of it is counted in `stats`."""

    def __init__(self, members: Membership, limits: Limits, stats: Stats) -> None:
        self._members = members
        self._limits = limits
        self._stats = stats
        self._bytes = 0

    def keep(self, commit: Commit) -> None:
        """Takes one more, at the expense of the oldest where there are too many."""
        shard = commit.session.shard
        shard.commits.append(commit)
        self._bytes += commit.bytes
        while shard.commits and (
            self._bytes > self._limits.commit_bytes or shard.unacknowledged > self._limits.commits
        ):
            oldest = shard.commits.popleft()
            shard.forget(oldest.session)
            self.drop(shard, oldest, "too many wait for the server")

    def send(self, shard: ShardState, conversation: Conversation, now: float) -> None:
        """Sends closes and the oldest commits.

        After an outage the rest follows with later messages, so that no step has to wait behind all of it.
        """
        batch, size = [], 0
        while shard.due(now) and size < self._limits.message_bytes:
            commit = shard.commits.popleft()
            batch.append(commit)
            size += commit.bytes
        if batch or shard.closes:
            conversation.close(batch, shard.closes, now)
            shard.closes = []

    def acknowledged(self, shard: ShardState, commits: Iterable[Commit]) -> None:
        """The shard has stored these."""
        for commit in commits:
            shard.patience = 0.0
            self._bytes -= commit.bytes
            self._stats.commits += 1

    def postpone(self, shard: ShardState, commits: Sequence[Commit], reason: str, now: float) -> None:
        """The store of the shard could not take these: they come first again, after a pause that doubles."""
        if not shard.patience:
            log.warning("%s: responses wait for its store: %s", shard.name, reason)
        shard.patience = min(max(FIRST_PAUSE, 2 * shard.patience), LAST_PAUSE)
        shard.not_before = now + shard.patience
        shard.commits.extendleft(reversed(commits))

    def again(self, shard: ShardState, commits: Iterable[Commit]) -> None:
        """The server did not know the sessions of these."""
        for commit in commits:
            commit.attempts += 1
            if commit.attempts < MAX_ATTEMPTS:
                self._owner(commit).commits.append(commit)
            else:
                self.drop(shard, commit, "the server did not know its session")

    def unsent(self, shard: ShardState, commits: Sequence[Commit]) -> None:
        """The stream broke before these were acknowledged: they come first again, at whoever owns them now."""
        for commit in reversed(commits):
            if commit.attempts < MAX_ATTEMPTS:
                self._owner(commit).commits.appendleft(commit)
            else:
                self.drop(shard, commit, "the server turned it down")

    def move(self, shards: Iterable[ShardState]) -> None:
        """The members have changed: what waits at these goes to its owners."""
        waiting: list[Commit] = []
        for shard in shards:
            waiting += shard.commits
            shard.commits.clear()
        for commit in waiting:
            self._owner(commit).commits.append(commit)

    def drop(self, shard: ShardState, commit: Commit, reason: str) -> None:
        """Gives one up, for a reason."""
        self._bytes -= commit.bytes
        self._stats.dropped_commits += 1
        log.warning("%s: dropped a finished response of %d tokens: %s", shard.name, commit.session.length, reason)

    def _owner(self, commit: Commit) -> ShardState:
        commit.session.shard = self._members.owner_of(commit.session)
        return commit.session.shard
