"""Knows which requests the model's own drafter has read.

A resting drafter also skips its first pass, which computes the keys and values that later passes read. Its drafts for
requests that ran during a rest of many steps would be poor, so these get none. A short gap matters less the more text
follows it.
"""

from collections.abc import Collection, Mapping

FEW = 16  # steps of a request that the drafter may have missed
HEALS = 16  # steps with the drafter after which one missed step counts no more
NO_PROMPT = 1 << 20  # a missed prompt counts as this many steps


class Gaps:
    """The steps of each request that the drafter has missed. Not thread-safe."""

    def __init__(self) -> None:
        self._missed: dict[str, tuple[int, int]] = {}  # steps, and the number of steps with the drafter until then
        self._ran = 0  # steps with the drafter
        self._left_out = False  # whether it missed prompts since the cache was last emptied

    def ran(self) -> None:
        """Notes a step with the drafter."""
        self._ran += 1

    def left_out(self, requests: Mapping[str, bool]) -> None:
        """Notes a step without the drafter's first pass: its requests, and whether it read part of their prompts."""
        for request, prompt in requests.items():
            self._missed[request] = self._count(request) + (NO_PROMPT if prompt else 1), self._ran
            self._left_out |= prompt

    def cached(self, request: str) -> None:
        """Notes that part of a prompt came from the cache: the drafter may have rested when it was computed."""
        if self._left_out:
            self._missed[request] = NO_PROMPT, self._ran

    def emptied(self) -> None:
        """Notes that the cache of prompts is empty."""
        self._left_out = False

    def whole(self, request: str) -> bool:
        """Returns whether the drafter has made a pass over the request's text, except for at most FEW steps."""
        return self._count(request) <= FEW

    def share(self, requests: Collection[str]) -> float:
        """Returns the share of the requests that are whole; 1 if there are none."""
        if not self._missed or not requests:
            return 1.0
        return sum(map(self.whole, requests)) / len(requests)

    def forget(self, request: str) -> None:
        """Removes a request that has left."""
        self._missed.pop(request, None)

    def _count(self, request: str) -> int:
        missed, at = self._missed.get(request, (0, 0))
        return missed if missed >= NO_PROMPT else max(0, missed - (self._ran - at) // HEALS)
