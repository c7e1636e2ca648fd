"""What a step brings, and what its drafts may cost."""

from collections.abc import Sequence
from typing import NamedTuple

from histospec.client import arguments
from histospec.client.core.session import Session
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.protocol.limits import DEFAULT_MAX_DRAFT


class Budget(NamedTuple):
    """How long drafts become; the arguments of `DraftClient.step`."""

    max_tokens: int = 16
    verify_cost: float = DEFAULT_VERIFY_COST

    def check(self) -> "Budget":
        """Itself, or ValueError naming the field that cannot be."""
        arguments.whole("max_tokens", self.max_tokens, 0, DEFAULT_MAX_DRAFT)
        if not arguments.is_number(self.verify_cost) or not 0 <= self.verify_cost <= arguments.LARGEST:
            cost = arguments.shown(self.verify_cost)
            raise ValueError(f"verify_cost: {cost} is not a finite number of at least 0")
        return self


class StepInput(NamedTuple):
    """What a step brings: the sessions, which have their new tokens already, and these tokens."""

    sessions: list[Session]
    before: list[int]
    """How many tokens each had without the new ones."""
    lengths: list[int]
    """How many new ones each got."""
    tokens: bytes
    """The new ones, one session after the other."""

    def take(self, rows: Sequence[int]) -> "StepInput":
        """The same of these rows alone."""
        sessions = [self.sessions[i] for i in rows]
        before = [self.before[i] for i in rows]
        tokens = b"".join([s.generated[4 * b : 4 * s.length] for s, b in zip(sessions, before, strict=True)])
        return StepInput(sessions, before, [self.lengths[i] for i in rows], tokens)
