"""What the drafts of a step may cost."""

import math
from typing import NamedTuple

MAX_DRAFT = 256
"""Longest draft that a server gives."""


class Budget(NamedTuple):
    """How long drafts become; the arguments of `DraftClient.step`."""

    max_tokens: int = 16
    verify_cost: float = 0.05

    def check(self) -> "Budget":
        """Itself, or ValueError naming the field that cannot be."""
        if not 0 <= self.max_tokens <= MAX_DRAFT:
            raise ValueError(f"max_tokens: {self.max_tokens} is outside [0, {MAX_DRAFT}]")
        if not 0 <= self.verify_cost < math.inf:
            raise ValueError(f"verify_cost: {self.verify_cost} is not a finite number of at least 0")
        return self
