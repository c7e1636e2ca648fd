"""Makes callers wait while responses arrive faster than the index can take them."""

import asyncio
import time

from histospec.native import Engine

LOOK_SECONDS = 0.005  # between two checks whether the index has room again
LONGEST_WAIT = 10.0  # seconds; then the caller must retry later
CROWDED = f"store: responses have arrived faster than the index can take them for {LONGEST_WAIT:g} seconds; try later"
UNINDEXED = 128 << 20  # bytes of ingests that may wait for the store and the index


class BackPressure:
    """Decides how much may wait for the index, and for how long. Used only on the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unindexed = 0

    async def room(self) -> bool:
        """Waits until the index has room; False if it has none after LONGEST_WAIT seconds."""
        until = time.monotonic() + LONGEST_WAIT
        while self._engine.congested() or self._unindexed > UNINDEXED:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    def took(self, size: int) -> None:
        """Counts an ingest of `size` bytes that starts to wait for the store and the index."""
        self._unindexed += size

    def indexed(self, size: int) -> None:
        """Uncounts an ingest that was indexed or failed."""
        self._unindexed -= size
