"""Remembers when a way of drafting that did not pay may be tried or taken again."""

from collections.abc import Iterable

from histospec.client.vllm.choice.modes import Way

FIRST, LONGEST = 64, 16384  # steps until a way is tried or taken again after it did not pay,
LONGER = 4  # each time this many times as many
CUT_SHORT = 16  # steps after a trial that was cut short, each time twice as many
FIRST_REST = 256  # steps of a rest of the model's drafter before it is tried again


class Pauses:
    """The pauses of each way. A step is named by its number. Not thread-safe."""

    def __init__(self, ways: Iterable[Way]) -> None:
        """`ways`: those that the engine may choose from."""
        self._ways = list(ways)
        self._blocked = dict.fromkeys(self._ways, 0)  # the step from which on a way may be taken again,
        self._untried = dict.fromkeys(self._ways, 0)  # or tried again
        self._pause = dict.fromkeys(self._ways, FIRST)
        self._cut_short = CUT_SHORT
        self._rested, self._rest = 0, FIRST_REST  # when the drafter began to rest, and the steps until a trial

    def may_take(self, way: Way, now: int) -> bool:
        """Returns whether the engine may change to a way."""
        return now >= self._blocked[way]

    def may_try(self, way: Way, now: int) -> bool:
        """Returns whether the engine may try a way for a few steps."""
        return now >= max(self._blocked[way], self._untried[way])

    def rested(self, now: int, times: int = 1) -> bool:
        """Returns whether a drafter has rested `times` times as long as it must before it is tried again."""
        return now - self._rested >= times * self._rest

    def left(self, way: Way, now: int, rests: bool, mistaken: bool) -> None:
        """Notes that the engine has changed from a way to another.

        Args:
            way: the former.
            now: the number of the step.
            rests: whether the model's drafter rests from now on.
            mistaken: whether the engine had changed to it only shortly before.
        """
        if mistaken:
            self._refuse(way, now, rests, self._blocked)
        else:
            self._pause[way], self._rest = FIRST, FIRST_REST
        if rests:
            self._rested = now

    def tried(self, way: Way, now: int, rests: bool) -> None:
        """Notes that a trial of a way has failed; `rests`: as for `left`."""
        self._refuse(way, now, rests, self._untried)
        self._cut_short = CUT_SHORT

    def cut_short(self, way: Way, now: int) -> None:
        """Notes a trial that ended before it could say anything. If that is so each time, trials become rare."""
        self._untried[way] = now + self._cut_short
        self._cut_short = min(2 * self._cut_short, LONGEST)

    def forgive_server(self) -> None:
        """Lets the engine try and take the ways with the server at once."""
        for way in self._ways:
            if way.server:
                self._blocked[way] = self._untried[way] = 0
                self._pause[way] = FIRST

    def _refuse(self, way: Way, now: int, rests: bool, until: dict[Way, int]) -> None:
        until[way] = now + self._pause[way]
        self._pause[way] = min(LONGER * self._pause[way], LONGEST)
        if rests:
            self._rested = now
            self._rest = min(LONGER * self._rest, LONGEST)
