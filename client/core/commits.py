"""Keeps finished responses until the server acknowledges them: sends them, sends them again, and gives them up.

Belongs to the core, which locks. A response waits in the queue of the shard that owns its problem. Each member has an
equal share of the limits; a shard that has left has none. Beyond the limits, the queue furthest over its share loses
its oldest response. A shard within its share therefore loses nothing, whatever the others do.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from histospec.client import arguments
from histospec.client.config import Limits
from histospec.client.core.outage_log import Losses
from histospec.client.core.session import Session
from histospec.client.values import ShardStats, Stats
from histospec.protocol import alternatives
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")

MAX_ATTEMPTS = 3
"""The client drops a response that the server turned down this often: the server would turn it down every time."""
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0
"""Seconds until the client sends again what a store could not take; the pause doubles from the first to the last."""


@dataclass(slots=True, eq=False)
class Commit:
    """A finished response on its way into the history, kept until the server acknowledges it."""

    session: Session
    epoch: int | None
    reward: float | None
    logprobs: bytes
    changes: int = 0
    alternatives: bytes = b""
    attempts: int = 0
    """How often a server turned it down."""
    number: int = 0
    """Increases in the order in which responses finished."""
    queue: "CommitQueue | None" = None
    """The queue that counts it; None before it is kept."""

    def message(self) -> pb.CloseSession:
        """Returns the close that commits it."""
        session = self.session
        return pb.CloseSession(
            session=session.number,
            commit=True,
            epoch=self.epoch,
            reward=self.reward,
            # The log-probabilities of tokens that another request generated are unknown.
            logprobs=b"" if session.continued else self.logprobs,
            generated=session.length,
            changes=self.changes,
            alternatives=alternatives.preceded(self.alternatives, session.own, session.continued),
        )

    @property
    def bytes(self) -> int:
        """Its bytes in memory, and approximately on the wire."""
        return self.session.bytes + len(self.logprobs) + len(self.alternatives)


def finished(
    sessions: Sequence[Session],
    epochs: int | Sequence[int | None] | None,
    rewards: float | Sequence[float | None] | None,
    logprobs: Sequence[Any] | None,
    changes: int | Sequence[int] | None,
    alternatives: Sequence[bytes | None] | None,
) -> list[Commit]:
    """Returns the responses of sessions that end, from the arguments of `DraftClient.finish`. Raises ValueError."""
    count = len(sessions)
    epoch = [arguments.epoch_number(name, v) for name, v in arguments.each("epochs", epochs, count)]
    change = [arguments.change_count(name, v) for name, v in arguments.each("changes", changes, count)]
    reward = [arguments.reward_number(name, v) for name, v in arguments.each("rewards", rewards, count)]
    given = arguments.for_each("logprobs", logprobs, arguments.LOGPROBS, "sessions", count)
    scores = [
        arguments.float_bytes(f"logprobs[{i}]", score, session.own)
        for i, (score, session) in enumerate(zip(given, sessions, strict=True))
    ]
    packed = arguments.for_each("alternatives", alternatives, arguments.ALTERNATIVES, "sessions", count)
    others = [
        arguments.alternative_bytes(f"alternatives[{i}]", some, session.own)
        for i, (some, session) in enumerate(zip(packed, sessions, strict=True))
    ]
    return [Commit(*one) for one in zip(sessions, epoch, reward, scores, change, others, strict=True)]


@dataclass(eq=False)
class CommitQueue:
    """The finished responses of one shard. Outlives the shard, for the sake of its counters."""

    name: str
    member: bool = True
    """Whether the shard is a member of the service."""
    stats: ShardStats = field(default_factory=ShardStats)
    waiting: deque[Commit] = field(default_factory=deque)
    """Responses to send; those that were sent are counted, too."""
    drop_oldest: Callable[[], Commit] = field(init=False)
    """Removes and returns the oldest response, also if it was sent; the shard sets it."""
    _fresh: int = 0
    """Bytes of responses added since the last ones were sent; they go with the next step, whatever else waits."""
    _pause: float = 0.0
    _not_before: float = -math.inf
    """When to send again after the shard's store could not take the last ones, on the monotonic clock."""

    def due(self, now: float) -> bool:
        """Returns whether there is a response to send."""
        return bool(self.waiting) and now >= self._not_before

    def add(self, commit: Commit) -> None:
        """Adds a response that has just finished."""
        self.waiting.append(commit)
        self._fresh += commit.bytes

    def take(self, now: float, capacity: int, most: int) -> list[Commit]:
        """Removes the oldest responses to send: `capacity` bytes and as many as were added since, but at most `most`.

        After an outage the rest follows with later messages, so that no step waits behind all of it.
        """
        size, limit = 0, min(max(0, capacity) + self._fresh, most)
        batch = []
        while self.due(now) and size < limit:
            commit = self.waiting.popleft()
            batch.append(commit)
            size += commit.bytes
        self._fresh = max(0, self._fresh - size)
        return batch

    def forget_fresh(self) -> None:
        """Lets all responses wait for capacity, as the shard cannot take them now."""
        self._fresh = 0

    def pause(self, reason: str, now: float) -> None:
        """Sends nothing for a while that doubles: the shard's store could not take the last responses."""
        if not self._pause:
            log.warning("HistoSpec: %s: responses wait for its store, and none is lost: %s", self.name, reason)
        self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LAST_PAUSE)
        self._not_before = now + self._pause
        self._fresh = 0

    def acknowledge(self, commits: Sequence[Commit]) -> None:
        """Notes that the shard has stored these."""
        if commits:
            self._pause = 0.0
            self.stats.committed += len(commits)


class Commits:
    """The responses of all shards, within `limits`. `owner` returns the queue of the shard that owns a session."""

    def __init__(self, limits: Limits, stats: Stats, owner: Callable[[Session], CommitQueue]) -> None:
        self.losses = Losses()
        self.pending = 0
        """How many responses wait, for all shards."""
        self._limits = limits
        self._stats = stats
        self._owner_of = owner
        self._number = 0
        self._bytes = 0
        self._queues: dict[str, CommitQueue] = {}
        self._kept: dict[int, Commit] = {}  # by session: all that wait, whether they were sent or not

    def queue(self, name: str) -> CommitQueue:
        """Returns the queue of a shard, which continues an earlier one of this name."""
        return self._queues.setdefault(name, CommitQueue(name))

    def by_shard(self) -> dict[str, ShardStats]:
        """Returns copies of the counters of every member, and of every former shard whose counters are not zero."""
        empty = ShardStats()
        return {q.name: replace(q.stats) for q in self._queues.values() if q.member or q.stats != empty}

    def keep(self, queue: CommitQueue, commit: Commit) -> None:
        """Adds a response. While too many wait, drops the oldest of the queue furthest over its share."""
        self._number += 1
        commit.number = self._number
        self._kept[commit.session.number] = commit
        self._enter(queue, commit)
        queue.add(commit)
        while (over := self._over()) is not None:
            self.drop(over.drop_oldest(), "too many wait for the server")

    def session(self, number: int) -> Session | None:
        """Returns the ended session with this number, if its response is kept."""
        commit = self._kept.get(number)
        return None if commit is None else commit.session

    def _over(self) -> CommitQueue | None:
        """Returns the queue that has to lose a response; None if all is within the limits."""
        queues, limits = self._queues.values(), self._limits
        members = sum(queue.member for queue in queues)
        if self._bytes > limits.commit_bytes:
            return max(queues, key=lambda q: q.stats.pending_bytes - q.member * limits.commit_bytes / members)
        if self.pending > limits.commits:
            return max(queues, key=lambda q: q.stats.pending - q.member * limits.commits / members)
        return None

    def acknowledged(self, queue: CommitQueue, commits: Sequence[Commit]) -> None:
        """Notes that a shard has stored these."""
        queue.acknowledge(commits)
        self._stats.commits += len(commits)
        for commit in commits:
            self._let_go(commit)

    def again(self, commits: Iterable[Commit]) -> None:
        """Puts these last again, or drops them after MAX_ATTEMPTS: the server did not know their sessions."""
        for commit in commits:
            commit.attempts += 1
            if commit.attempts < MAX_ATTEMPTS:
                self._owner(commit).waiting.append(commit)
            else:
                self.drop(commit, "the server did not know its session")

    def unsent(self, commits: Sequence[Commit]) -> None:
        """Puts these first again at their present owners: the server has not acknowledged them."""
        for commit in reversed(commits):
            if commit.attempts < MAX_ATTEMPTS:
                self._owner(commit).waiting.appendleft(commit)
            else:
                self.drop(commit, "the server turned it down")

    def move(self) -> None:
        """Moves what waits to its owners, the oldest first, after the members have changed."""
        waiting: list[Commit] = []
        for queue in self._queues.values():
            waiting += queue.waiting
            queue.waiting.clear()
        for commit in sorted(waiting, key=lambda c: c.number):
            self._owner(commit).waiting.append(commit)

    def drop(self, commit: Commit, reason: str) -> None:
        """Drops a response that was kept, for a reason."""
        self.refuse(self._let_go(commit), commit, reason)

    def refuse(self, queue: CommitQueue, commit: Commit, reason: str) -> None:
        """Counts a response as dropped that was never kept, for a reason."""
        self._stats.dropped_commits += 1
        queue.stats.dropped += 1
        self.losses.note(queue.name, commit.session.length, reason)

    def recount(self, ended: Iterable[Commit]) -> None:
        """Lets every kept response wait again, after an interrupt in the middle of anything; and these, which it ended.

        May be called again.
        """
        for queue in self._queues.values():
            queue.waiting.clear()
            queue.forget_fresh()
            queue.stats.pending = queue.stats.pending_bytes = 0
        self.pending = self._bytes = 0
        kept = sorted(self._kept.values(), key=lambda c: c.number)
        for commit in kept:
            queue = self._owner_of(commit.session)
            self._enter(queue, commit)
            queue.waiting.append(commit)
        for commit in ended:
            if commit.session.number not in self._kept:
                self.keep(self._owner_of(commit.session), commit)

    def _let_go(self, commit: Commit) -> CommitQueue:
        self._kept.pop(commit.session.number, None)
        return self._leave(commit)

    def _owner(self, commit: Commit) -> CommitQueue:
        owner = self._owner_of(commit.session)
        if owner is not commit.queue:
            self._leave(commit)
            self._enter(owner, commit)
        return owner

    def _enter(self, queue: CommitQueue, commit: Commit) -> None:
        commit.queue = queue
        self._count(queue, 1, commit.bytes)

    def _leave(self, commit: Commit) -> CommitQueue:
        assert commit.queue is not None
        queue, commit.queue = commit.queue, None
        self._count(queue, -1, -commit.bytes)
        return queue

    def _count(self, queue: CommitQueue, commits: int, size: int) -> None:
        queue.stats.pending += commits
        queue.stats.pending_bytes += size
        self.pending += commits
        self._bytes += size
