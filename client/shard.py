"""What a client keeps for each shard, and for each step on its way."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from histospec.client.breaker import CircuitBreaker
from histospec.client.config import Config, Endpoint
from histospec.client.conversation import Conversation, Drafts
from histospec.client.session import Commit, Session


class ShardState:
    """One shard as the client knows it."""

    def __init__(self, index: int, endpoint: Endpoint, config: Config) -> None:
        self.index = index
        self.endpoint = endpoint
        self.breaker = CircuitBreaker(config.breaker)
        self.conversation: Conversation | None = None
        self.commits: deque[Commit] = deque()
        """To be sent."""
        self.closes: list[int] = []
        """Sessions to close without a commit."""
        self.opens: dict[int, Session] = {}
        """Sessions without a step so far; a flush tells it of them."""

    @property
    def unacknowledged(self) -> int:
        """Commits that the server has not acknowledged."""
        sent = self.conversation.commits.values() if self.conversation else ()
        return len(self.commits) + sum(map(len, sent))


@dataclass(slots=True, eq=False)
class Part:
    """What one shard owes to a step."""

    shard: ShardState
    conversation: Conversation
    sequence: int
    rows: Sequence[int]
    """Where its sessions stand in the step."""
    drafts: Drafts | None = None
    done: bool = False


@dataclass(slots=True, eq=False)
class Pending:
    """A step that was sent and not yet received."""

    size: int
    deadline: float
    """On the monotonic clock."""
    parts: list[Part]
    touched: list[ShardState]
    """Shards with something to write."""

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        return all(part.done for part in self.parts)
