"""What the drafts of a step may cost."""

import math
from typing import NamedTuple

from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.protocol.limits import DEFAULT_MAX_DRAFT


class Budget(NamedTuple):
    """How long drafts become; the arguments of `DraftClient.step`."""

    max_tokens: int = 16
    verify_cost: float = DEFAULT_VERIFY_COST

    def check(self) -> "Budget":
        """Itself, or ValueError naming the field that cannot be."""
        if not 0 <= self.max_tokens <= DEFAULT_MAX_DRAFT:
            raise ValueError(f"max_tokens: {self.max_tokens} is outside [0, {DEFAULT_MAX_DRAFT}]")
        if not 0 <= self.verify_cost < math.inf:
            raise ValueError(f"verify_cost: {self.verify_cost} is not a finite number of at least 0")
        return self
