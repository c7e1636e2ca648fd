"""Keeps finished responses until the server acknowledges them: sends them, sends them again, and gives them up.

Belongs to the core, which locks. A response waits at the shard that owns its problem. Each member has an equal share of
the limits; a shard that has left has none. Beyond the limits, the shard furthest over its share loses its oldest
response. A shard within its share therefore loses nothing, whatever the others do.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from histospec.client.config import Limits
from histospec.client.core.conversation import Conversation
from histospec.client.core.membership import Membership
from histospec.client.core.news import Losses
from histospec.client.core.room import UNLIMITED
from histospec.client.core.session import Commit
from histospec.client.core.shard import ShardState
from histospec.client.values import ShardStats, Stats

log = logging.getLogger("histospec.client")

MAX_ATTEMPTS = 3
"""The client drops a response that the server turned down this often: the server would turn it down every time."""


FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0
"""Seconds until the client sends again what a store could not take."""


class Commits:
    """The responses that wait, within `limits`. Counts in `stats` and by shard what becomes of them."""

    def __init__(self, members: Membership, limits: Limits, stats: Stats) -> None:
        self.losses = Losses()
        self.pending = 0
        """How many responses wait, for all shards."""
        self._members = members
        self._limits = limits
        self._stats = stats
        self._number = 0
        self._bytes = 0
        self._books: dict[str, ShardStats] = {}
        self._owners: dict[int, ShardState] = {}  # the shard at which each commit waits, by its number

    def by_shard(self) -> dict[str, ShardStats]:
        """Returns copies of the counters of every member, and of every former shard whose counters are not zero."""
        for shard in self._members.shards:
            self._book(shard)
        members = {shard.name for shard in self._members.shards}
        empty = ShardStats()
        return {name: replace(book) for name, book in self._books.items() if name in members or book != empty}

    def keep(self, shard: ShardState, commit: Commit) -> None:
        """Adds a response. While too many wait, drops the oldest of the shard furthest over its share."""
        self._number += 1
        commit.number = self._number
        self._enter(shard, commit)
        shard.commits.append(commit)
        shard.fresh += commit.bytes
        while (over := self._over()) is not None:
            oldest = self._oldest(over)
            over.forget(oldest.session)
            self.drop(over, oldest, "too many wait for the server")

    def _over(self) -> ShardState | None:
        """Returns the shard that has to lose a response; None if all is within the limits."""
        limits = self._limits
        if self._bytes > limits.commit_bytes:
            return max(
                self._members.everybody, key=lambda s: self._book(s).pending_bytes - self._share(s, limits.commit_bytes)
            )
        if self.pending > limits.commits:
            return max(self._members.everybody, key=lambda s: self._book(s).pending - self._share(s, limits.commits))
        return None

    def _share(self, shard: ShardState, limit: int) -> float:
        return 0 if shard.left else limit / len(self._members.shards)

    @staticmethod
    def _oldest(shard: ShardState) -> Commit:
        """Removes and returns the first response that waits, or else the first one sent, which may still be stored."""
        if shard.commits:
            return shard.commits.popleft()
        assert shard.conversation is not None
        sent = shard.conversation.commits
        sequence, batch = next(iter(sent.items()))
        if len(batch) == 1:
            del sent[sequence]
        return batch.pop(0)

    def dispatch(self, shard: ShardState, conversation: Conversation, now: float, room: int = UNLIMITED) -> None:
        """Sends closes and the oldest commits: as many bytes as were added since the last call, and `room` more.

        After an outage the rest follows with later messages, so that no step waits behind all of it. A full message
        that is not acknowledged yet holds up all further ones.
        """
        if not (shard.commits or shard.closes):
            shard.fresh = 0
            return
        most = self._limits.message_bytes - conversation.flow.unacknowledged
        room = min(max(0, room) + shard.fresh, most)
        batch, size = [], 0
        while shard.due(now) and size < room:
            commit = shard.commits.popleft()
            batch.append(commit)
            size += commit.bytes
        shard.fresh = max(0, shard.fresh - size)
        if batch or shard.closes:
            left = conversation.queue_closes(batch, shard.closes, now)
            shard.closes = []
            shard.commits.extendleft(reversed(left))

    def acknowledged(self, shard: ShardState, commits: Iterable[Commit]) -> None:
        """Notes that the shard has stored these."""
        for commit in commits:
            shard.patience = 0.0
            self._leave(commit)
            self._book(shard).committed += 1
            self._stats.commits += 1

    def postpone(self, shard: ShardState, commits: Sequence[Commit], reason: str, now: float) -> None:
        """Puts these first again, after a pause that doubles: the shard's store could not take them."""
        if not shard.patience:
            log.warning("HistoSpec: %s: responses wait for its store: %s", shard.name, reason)
        shard.patience = min(max(FIRST_PAUSE, 2 * shard.patience), LAST_PAUSE)
        shard.not_before = now + shard.patience
        shard.fresh = 0
        for commit in reversed(commits):
            self._owner(commit).commits.appendleft(commit)

    def again(self, shard: ShardState, commits: Iterable[Commit]) -> None:
        """Puts these last again, or drops them after MAX_ATTEMPTS: the server did not know their sessions."""
        for commit in commits:
            commit.attempts += 1
            if commit.attempts < MAX_ATTEMPTS:
                self._owner(commit).commits.append(commit)
            else:
                self.drop(shard, commit, "the server did not know its session")

    def unsent(self, shard: ShardState, commits: Sequence[Commit]) -> None:
        """Puts these first again at their present owners: the stream broke before the server acknowledged them."""
        for commit in reversed(commits):
            if commit.attempts < MAX_ATTEMPTS:
                self._owner(commit).commits.appendleft(commit)
            else:
                self.drop(shard, commit, "the server turned it down")

    def move(self, shards: Iterable[ShardState]) -> None:
        """Moves what waits at these shards to its owners, the oldest first, after the members have changed."""
        waiting: list[Commit] = []
        for shard in shards:
            waiting += shard.commits
            shard.commits.clear()
        for commit in sorted(waiting, key=lambda c: c.number):
            self._owner(commit).commits.append(commit)

    def drop(self, shard: ShardState, commit: Commit, reason: str) -> None:
        """Drops a response that was kept, for a reason."""
        self._leave(commit)
        self.refuse(shard, commit, reason)

    def refuse(self, shard: ShardState, commit: Commit, reason: str) -> None:
        """Counts a response as dropped that was never kept, for a reason."""
        self._stats.dropped_commits += 1
        self._book(shard).dropped += 1
        self.losses.note(shard.name, commit.session.length, reason)

    def _owner(self, commit: Commit) -> ShardState:
        owner = self._members.owner_of(commit.session)
        if owner is not self._owners[commit.number]:
            self._leave(commit)
            self._enter(owner, commit)
        return owner

    def _book(self, shard: ShardState) -> ShardStats:
        return self._books.setdefault(shard.name, ShardStats())

    def _enter(self, shard: ShardState, commit: Commit) -> None:
        self._owners[commit.number] = shard
        self._count(shard, 1, commit.bytes)

    def _leave(self, commit: Commit) -> None:
        self._count(self._owners.pop(commit.number), -1, -commit.bytes)

    def _count(self, shard: ShardState, commits: int, size: int) -> None:
        book = self._book(shard)
        book.pending += commits
        book.pending_bytes += size
        self.pending += commits
        self._bytes += size
