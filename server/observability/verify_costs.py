"""What open streams have lately said that verifying a drafted token costs."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

LATELY = 300.0
"""Seconds. A stream that has not stepped for longer does not count."""

Said = dict[str, tuple[float, float]]
"""Of one stream: by namespace, the cost that its last step said, and when."""


class VerifyCosts:
    """One entry a stream and namespace. Written on the event loop, read from any thread.

    Args:
        clock: seconds that never jump.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._streams: dict[int, Said] = {}

    def open(self) -> Said:
        """Where a new stream notes what its steps say, with the time of `clock`."""
        said: Said = {}
        self._streams[id(said)] = said
        return said

    def close(self, said: Said) -> None:
        """The stream ended: what it said no longer counts."""
        self._streams.pop(id(said), None)

    def lately(self) -> dict[str, float]:
        """The median over the streams, by namespace; nothing of one in which no stream steps."""
        oldest = self.clock() - LATELY
        costs: dict[str, list[float]] = defaultdict(list)
        for said in self._streams.copy().values():  # copies: streams go on meanwhile
            for namespace, (cost, when) in said.copy().items():
                if when >= oldest:
                    costs[namespace].append(cost)
        return {namespace: statistics.median(some) for namespace, some in costs.items()}
