"""Lets callers wait while responses arrive faster than the index takes them."""

import asyncio
import time

from histospec.native import Engine

LOOK_SECONDS = 0.005  # between two looks whether the index has room again
LONGEST_WAIT = 10.0  # seconds for that; then the caller is told to come back
CROWDED = f"store: for {LONGEST_WAIT:g} seconds responses have come faster than the index takes them; try later"
UNINDEXED = 128 << 20  # bytes of ingests that may wait for the store and the index


class BackPressure:
    """Decides how much may wait for the index, and for how long. Lives on the event loop."""

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
        """An ingest of `size` bytes begins to wait for the store and the index."""
        self._unindexed += size

    def indexed(self, size: int) -> None:
        """It waits no longer: it is indexed, or it failed."""
        self._unindexed -= size
