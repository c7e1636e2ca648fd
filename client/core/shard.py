"""What a client keeps for each shard, and for each step on its way."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from histospec.client.config import Config, Endpoint
from histospec.client.core.breaker import CircuitBreaker
from histospec.client.core.conversation import Conversation, Drafts
from histospec.client.core.news import Contact
from histospec.client.core.pace import Pace
from histospec.client.core.room import ServerLimits
from histospec.client.core.session import Commit, Session


class ShardState:
    """One shard as the client knows it. Without an address it stands for those that are still to be found."""

    def __init__(self, endpoint: Endpoint, config: Config) -> None:
        self.endpoint = endpoint
        self.left = False
        """Whether it is a member no more."""
        self.breaker = CircuitBreaker(config.breaker)
        self.contact = Contact()
        deadline = config.timeouts.step
        self.opening = Pace(deadline, soon=deadline / 2, growth=0.5)
        self.committing = Pace(deadline, soon=deadline / 4, growth=0.125)
        """How much of opens, and of commits that waited for it, may be ahead of a step."""
        self.fresh = 0
        """Bytes of commits that came since the last ones were sent; they go with the next step, whatever waits."""
        self.conversation: Conversation | None = None
        self.limits = ServerLimits()
        """What it takes, as far as it is known."""
        self.commits: deque[Commit] = deque()
        """To be sent ..."""
        self.patience = 0.0
        self.not_before = -math.inf
        """... but not before this, on the monotonic clock: its store could not take the last ones."""
        self.closes: list[int] = []
        """Sessions to close without a commit."""
        self.opens: dict[int, Session] = {}
        """Sessions without a step so far; a flush tells it of them."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.endpoint.name

    @property
    def where(self) -> str:
        """Its name and address, for messages."""
        name, address = self.endpoint.name, self.endpoint.address
        return f"{name} at {address}" if address not in ("", name) else name

    @property
    def state(self) -> str:
        """That of its breaker."""
        return self.breaker.state if self.endpoint.address else "open"

    @property
    def settled(self) -> bool:
        """Whether it was told everything and has acknowledged every commit, or is lost."""
        if not (self.endpoint.address or self.left):
            return False
        return self.conversation is None or self.conversation.settled

    def due(self, now: float) -> bool:
        """Whether there is a commit to send."""
        return bool(self.commits) and now >= self.not_before

    def forget(self, session: Session) -> None:
        """The session is none of its business any more."""
        self.opens.pop(session.number, None)
        if self.conversation and session.number in self.conversation.held:
            self.closes.append(session.number)


@dataclass(slots=True, eq=False)
class Part:
    """What one shard owes to a step."""

    shard: ShardState
    conversation: Conversation
    step: int
    rows: Sequence[int]
    """Where its sessions stand in the step."""
    begun: float
    """On the monotonic clock."""
    opens: int
    """Bytes ahead of it ..."""
    commits: int
    """... of either kind."""
    drafts: list[tuple[Sequence[int], Drafts]] = field(default_factory=list)
    """What came, and for which of the rows."""
    done: bool = False


@dataclass(slots=True, eq=False)
class Pending:
    """A step that was sent and not yet received."""

    size: int
    deadline: float
    """On the monotonic clock."""
    parts: list[Part]
    touched: list[ShardState]
    """Shards with something to write, or to be found."""

    def __repr__(self) -> str:
        answered = sum(part.done for part in self.parts)
        return f"<Pending step of {self.size} sessions: {answered} of {len(self.parts)} shards done>"

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        return all(part.done for part in self.parts)
