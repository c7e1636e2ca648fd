"""A `verify_cost` that the user has set."""

from histospec.client.vllm.choice.clock import WATCHED
from histospec.client.vllm.choice.promise import Promise
from histospec.protocol.costs import HOPELESS_VERIFY_COST


class FixedCost:
    """Asks with this cost in every step; in none if nothing would be drafted at it. Learns nothing."""

    learned = looks_next = curious = False

    def __init__(self, value: float) -> None:
        self.value = self.told = self.moderate = value
        self._asks = value < HOPELESS_VERIFY_COST
        self._number = 0

    def next(self) -> float | None:
        """Returns the value; None if nothing would be drafted at it."""
        return self.value if self._asks else None

    def observe(
        self, seconds: float, sequences: int, tokens: int, alone: bool = False, generated: int | None = None
    ) -> None:
        """Learns nothing from it."""

    def promised(self, promise: Promise) -> None:
        """Learns nothing from it."""

    def passes(self) -> bool:
        """Returns whether the caller may leave out `observe` and `next` after a step without drafts."""
        self._number += 1
        return not self._asks and self._number % WATCHED > 0
