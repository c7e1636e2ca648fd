"""The four modes of drafting, what the model's own drafter can do, and the pauses of modes that did not pay."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

REST = -1
"""As the number of tokens that the drafter makes: no pass at all."""


class Mode(NamedTuple):
    """Who drafts."""

    server: bool
    drafter: bool


NOTHING, SERVER, DRAFTER, BOTH = Mode(False, False), Mode(True, False), Mode(False, True), Mode(True, True)


class Limits(NamedTuple):
    """What the model's own drafter can do.

    Attributes:
        longest: the most tokens that it can make.
        fixed: the number of tokens that it always makes; None: the number that pays.
        may_vary: it makes as many tokens as the step says; otherwise always `longest`.
        may_rest: a step can leave it out.
    """

    longest: int
    fixed: int | None = None
    may_vary: bool = True
    may_rest: bool = True

    @property
    def follows_steps(self) -> bool:
        """Whether vLLM's workers follow the number in a step, or its REST; else they always make `longest`."""
        return self.may_vary or self.may_rest

    @property
    def runs(self) -> Sequence[bool]:
        """Whether the drafter may run: the values that a mode can have."""
        if self.fixed == 0 and self.may_rest:
            return (False,)
        return (True,) if self.fixed is not None or not self.may_rest else (False, True)

    @property
    def most(self) -> int:
        """How many tokens of its drafts count: a drafter that cannot vary may make more than the setting says."""
        return self.longest if self.fixed is None else self.fixed


NO_DRAFTER = Limits(1, 0)
"""For a model without a drafter of its own."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 16384  # steps until a mode is tried or taken again after it did not pay
LONGER_PAUSE = 4  # each failure multiplies the pause by 4
CUT_SHORT = 16  # steps after a trial that was cut short; doubles each time
FIRST_REST = 256  # steps of a rest of the model's drafter before it is tried again; as a pause, it grows


class Pauses:
    """When modes that did not pay may be tried or taken again. A step is named by its number. Not thread-safe."""

    def __init__(self, modes: Iterable[Mode]) -> None:
        """`modes`: those that the engine may choose from."""
        self._modes = list(modes)
        self._blocked = dict.fromkeys(self._modes, 0)  # the step from which on a mode may be taken again,
        self._untried = dict.fromkeys(self._modes, 0)  # or tried again
        self._pause = dict.fromkeys(self._modes, FIRST_PAUSE)
        self._cut_short = CUT_SHORT
        self._rested, self._rest = 0, FIRST_REST  # when the drafter began to rest, and the steps until a trial

    def may_take(self, mode: Mode, now: int) -> bool:
        """Returns whether the engine may change to a mode."""
        return now >= self._blocked[mode]

    def may_try(self, mode: Mode, now: int) -> bool:
        """Returns whether the engine may try a mode for a few steps."""
        return now >= max(self._blocked[mode], self._untried[mode])

    def rested(self, now: int, times: int = 1) -> bool:
        """Returns whether a drafter has rested `times` times as long as it must before it is tried again."""
        return now - self._rested >= times * self._rest

    def left(self, mode: Mode, now: int, rests: bool, mistaken: bool) -> None:
        """Notes that the engine has changed from a mode to another.

        Args:
            mode: the former.
            now: the number of the step.
            rests: whether the model's drafter rests from now on.
            mistaken: whether the engine had changed to it only shortly before.
        """
        if mistaken:
            self._refuse(mode, now, rests, self._blocked)
        else:
            self._pause[mode], self._rest = FIRST_PAUSE, FIRST_REST
        if rests:
            self._rested = now

    def tried(self, mode: Mode, now: int, rests: bool) -> None:
        """Notes that a trial of a mode has failed; `rests`: as for `left`."""
        self._refuse(mode, now, rests, self._untried)
        self._cut_short = CUT_SHORT

    def cut_short(self, mode: Mode, now: int) -> None:
        """Notes a trial that ended before it could say anything. If that is so each time, trials become rare."""
        self._untried[mode] = now + self._cut_short
        self._cut_short = min(2 * self._cut_short, LONGEST_PAUSE)

    def forgive_server(self) -> None:
        """Lets the engine try and take the modes with the server at once."""
        for mode in self._modes:
            if mode.server:
                self._blocked[mode] = self._untried[mode] = 0
                self._pause[mode] = FIRST_PAUSE

    def _refuse(self, mode: Mode, now: int, rests: bool, until: dict[Mode, int]) -> None:
        until[mode] = now + self._pause[mode]
        self._pause[mode] = min(LONGER_PAUSE * self._pause[mode], LONGEST_PAUSE)
        if rests:
            self._rested = now
            self._rest = min(LONGER_PAUSE * self._rest, LONGEST_PAUSE)
