"""Gives the updates of SpecRL's updater, which have no epochs, an epoch each.

The updater sends all prompts of a training step, or of a batch of validation, at the same time: a burst. A prompt that
returns in a later burst starts the next epoch. A prompt that appears several times in one burst, as each copy of a
repeated validation set does, starts none.

A burst begins with an update that arrives after a pause of PAUSE_SECONDS, in which the server handled no update. It
takes the updates that arrive until the next pause, and at most for BURST_SECONDS, so that the epochs of a trainer that
never pauses advance, too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_SECONDS = 1.0
BURST_SECONDS = 60.0
MAX_PROMPTS = 1 << 20
"""Prompts of an epoch that are remembered, about 100 MB of them; one more starts the next epoch."""


class Visits:
    """The prompts that had an update in the newest epoch, and in which burst. Used only on the event loop.

    Args:
        clock: seconds since any time.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._burst = 0
        self._began = self._answered = -PAUSE_SECONDS
        self._running = 0
        self._epoch = -1
        self._advanced = 0  # the burst that began this epoch
        self._prompts: dict[int, int] = {}  # by hash: the last burst

    @contextmanager
    def update(self) -> Iterator[int]:
        """Yields the burst of an update that arrives now; the block handles the update."""
        now = self._clock()
        paused = not self._running and now - self._answered >= PAUSE_SECONDS
        if not self._burst or paused or now - self._began >= BURST_SECONDS:
            self._burst += 1
            self._began = now
        self._running += 1
        try:
            yield self._burst
        finally:
            self._running -= 1
            self._answered = self._clock()

    def epoch(self, prompt: int, burst: int, newest: int) -> int:
        """Returns the epoch for an update: `newest`, the newest epoch of the namespace, or the one after it.

        Args:
            prompt: hash of the prompt.
            burst: the burst in which the update arrived.
            newest: the newest epoch of the namespace.

        """
        if newest != self._epoch:
            return newest
        before = self._prompts.get(prompt)
        if before is None:
            return newest + (len(self._prompts) >= MAX_PROMPTS)
        return newest + (burst > max(before, self._advanced))

    def note(self, prompt: int, burst: int, epoch: int) -> None:
        """Records an update."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._advanced = burst
            self._prompts.clear()
        self._prompts[prompt] = max(burst, self._prompts.get(prompt, 0))
