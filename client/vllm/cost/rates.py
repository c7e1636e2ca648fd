"""Tokens for the price of a plain step, of the latest steps of one kind."""

MEMORY = 1024.0  # sequences times steps
STEPS = 24.0  # at most, however many sequences each has


class Rate:
    """What the latest steps gave and what they cost, both a sequence: means over about STEPS steps."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets them."""
        self.steps = 0
        self.weight = 0.0
        """Sequences times steps behind the rate."""
        self._generated = self._price = self._drafted = 0.0

    def add(self, sequences: int, generated: int, drafted: int, price: float) -> None:
        """One step more. `price`: in plain steps."""
        kept = max(0.0, 1 - max(1 / STEPS, sequences / MEMORY))
        self.steps += 1
        self.weight = kept * self.weight + sequences
        self._generated = kept * self._generated + generated
        self._drafted = kept * self._drafted + drafted
        self._price = kept * self._price + sequences * price

    @property
    def speed(self) -> float:
        """Tokens that a sequence gains for the price of a plain step; 1 before the first step."""
        return self._generated / self._price if self._price else 1.0

    @property
    def drafted(self) -> float:
        """Drafted tokens a sequence and step."""
        return self._drafted / self.weight if self.weight else 0.0
