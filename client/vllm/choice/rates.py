"""Means of the latest steps of one kind: their tokens, and their work."""

from histospec.client.vllm.choice.prices import Looks

MEMORY = 1024.0  # sequences times steps
STEPS = 24.0  # the most steps if nothing else is said, however few sequences each has


class Rate:
    """Means over the latest steps."""

    def __init__(self, most: float = STEPS) -> None:
        """`most`: over about how many steps, at most."""
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forgets all steps."""
        self.steps = 0
        self._weight = self._generated = 0.0
        self._looks: Looks = ()

    def add(self, sequences: int, generated: int, looks: Looks) -> None:
        """Adds a step: how many sequences it computed, the tokens that it yielded, and its work."""
        kept = max(0.0, 1 - max(1 / self._most, sequences / MEMORY))
        before = self._looks or (0.0,) * len(looks)
        self._looks = tuple(sequences * new + kept * old for new, old in zip(looks, before, strict=True))
        self._weight = kept * self._weight + sequences
        self._generated = kept * self._generated + generated
        self.steps += 1

    @property
    def generated(self) -> float:
        """Tokens per sequence and step. There must be a step."""
        return self._generated / self._weight

    @property
    def looks(self) -> Looks:
        """The mean work of a step. There must be one."""
        return tuple(look / self._weight for look in self._looks)
