"""The client's state of each shard, and of each step on its way."""

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
    """One shard as the client knows it. Without an address it stands for the shards that are still to be found."""

    def __init__(self, endpoint: Endpoint, config: Config) -> None:
        self.endpoint = endpoint
        self.left = False
        """Whether it is no longer a member."""
        self.breaker = CircuitBreaker(config.breaker)
        self.contact = Contact()
        deadline = config.timeouts.step
        self.opening = Pace(deadline, soon=deadline / 2, growth=0.5)
        self.committing = Pace(deadline, soon=deadline / 4, growth=0.125)
        """How many bytes of opens, and of commits that waited for the shard, may be ahead of a step."""
        self.fresh = 0
        """Bytes of commits added since the last ones were sent; they go with the next step, whatever else waits."""
        self.conversation: Conversation | None = None
        self.limits = ServerLimits()
        """What it accepts, as far as the client knows."""
        self.commits: deque[Commit] = deque()
        """Commits to send."""
        self.patience = 0.0
        self.not_before = -math.inf
        """When to send them again after its store could not take the last ones, on the monotonic clock."""
        self.closes: list[int] = []
        """Sessions to close without a commit."""
        self.opens: dict[int, Session] = {}
        """Sessions without a step so far; a flush opens them."""

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return self.endpoint.name

    @property
    def where(self) -> str:
        """Its name and address, for messages."""
        name, address = self.endpoint.name, self.endpoint.address
        return f"{name} at {address}" if address not in ("", name) else name

    @property
    def state(self) -> str:
        """The state of its breaker; "open" while it is still to be found."""
        return self.breaker.state if self.endpoint.address else "open"

    @property
    def settled(self) -> bool:
        """Whether it has all messages and has acknowledged every commit, or is lost."""
        if not (self.endpoint.address or self.left):
            return False
        return self.conversation is None or self.conversation.settled

    def due(self, now: float) -> bool:
        """Returns whether there is a commit to send."""
        return bool(self.commits) and now >= self.not_before

    def forget(self, session: Session) -> None:
        """Removes a session that has ended or moved to another shard."""
        self.opens.pop(session.number, None)
        if self.conversation and session.number in self.conversation.held:
            self.closes.append(session.number)


@dataclass(slots=True, eq=False)
class Part:
    """The part of a step that one shard has to answer."""

    shard: ShardState
    conversation: Conversation
    step: int
    rows: Sequence[int]
    """The rows of its sessions in the step."""
    begun: float
    """When it was sent, on the monotonic clock."""
    opens: int
    """Bytes of opens ahead of it."""
    commits: int
    """Bytes of commits ahead of it."""
    drafts: list[tuple[Sequence[int], Drafts]] = field(default_factory=list)
    """The drafts that have arrived, with their rows."""
    done: bool = False


@dataclass(slots=True, eq=False)
class Pending:
    """A step that was sent and not yet received."""

    size: int
    deadline: float
    """On the monotonic clock."""
    parts: list[Part]
    touched: list[ShardState]
    """Shards that have something to write, or are still to be found."""

    def __repr__(self) -> str:
        answered = sum(part.done for part in self.parts)
        return f"<Pending step of {self.size} sessions: {answered} of {len(self.parts)} shards done>"

    @property
    def done(self) -> bool:
        """Whether every shard has answered or was given up."""
        for part in self.parts:  # noqa: SIM110 - the loop asks after each event, and `all` takes three times as long
            if not part.done:
                return False
        return True
