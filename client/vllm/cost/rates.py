"""What the latest steps of one kind gave, and what they did."""

from .prices import Looks

MEMORY = 1024.0  # sequences times steps
STEPS = 24.0  # at most, however many sequences each has


class Rate:
    """Means over about STEPS steps."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets them."""
        self.steps = 0
        self._weight = self._generated = 0.0
        self._looks: Looks = ()

    def add(self, sequences: int, generated: int, looks: Looks) -> None:
        """One step more of so many sequences: the tokens that came out of it, and what it did."""
        kept = max(0.0, 1 - max(1 / STEPS, sequences / MEMORY))
        before = self._looks or (0.0,) * len(looks)
        self._looks = tuple(sequences * new + kept * old for new, old in zip(looks, before, strict=True))
        self._weight = kept * self._weight + sequences
        self._generated = kept * self._generated + generated
        self.steps += 1

    @property
    def generated(self) -> float:
        """Tokens a sequence and step. There is a step."""
        return self._generated / self._weight

    @property
    def looks(self) -> Looks:
        """What a step does. There is one."""
        return tuple(look / self._weight for look in self._looks)
