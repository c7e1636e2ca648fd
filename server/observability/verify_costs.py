"""The verify costs that open streams have recently reported."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

LATELY = 300.0
"""Seconds after which a stream that has not stepped no longer counts."""

Said = dict[str, tuple[float, float]]
"""The reports of one stream, by namespace: the cost of its last step, and the time."""


class VerifyCosts:
    """One entry per stream and namespace. Written on the event loop, read from any thread.

    Args:
        clock: monotonic clock in seconds.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._streams: dict[int, Said] = {}

    def open(self) -> Said:
        """Returns the place where a new stream records its costs with the time of `clock`."""
        said: Said = {}
        self._streams[id(said)] = said
        return said

    def close(self, said: Said) -> None:
        """Removes an ended stream."""
        self._streams.pop(id(said), None)

    def lately(self) -> dict[str, float]:
        """Returns the median over streams, by namespace; no entry for a namespace without active streams."""
        oldest = self.clock() - LATELY
        costs: dict[str, list[float]] = defaultdict(list)
        for said in self._streams.copy().values():  # copies: streams change them meanwhile
            for namespace, (cost, when) in said.copy().items():
                if when >= oldest:
                    costs[namespace].append(cost)
        return {namespace: statistics.median(some) for namespace, some in costs.items()}
