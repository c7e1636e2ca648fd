"""What the drafts of a step may cost."""

from typing import NamedTuple

from histospec.client import arguments
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
