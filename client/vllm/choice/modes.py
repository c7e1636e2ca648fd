"""The four ways in which an engine can draft whose model has a drafter of its own, and what this drafter can do."""

from collections.abc import Sequence
from typing import NamedTuple

REST = -1
"""As the number of tokens that the drafter makes: no pass at all."""


class Way(NamedTuple):
    """Who drafts."""

    server: bool
    drafter: bool


BARE, SERVER, MODEL, BOTH = Way(False, False), Way(True, False), Way(False, True), Way(True, True)


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
    def told(self) -> bool:
        """Whether vLLM's workers follow the number in a step, or its REST; else they always make `longest`."""
        return self.may_vary or self.may_rest

    @property
    def runs(self) -> Sequence[bool]:
        """Whether the drafter may run: the values that a way can have."""
        if self.fixed == 0 and self.may_rest:
            return (False,)
        return (True,) if self.fixed is not None or not self.may_rest else (False, True)

    @property
    def most(self) -> int:
        """How many tokens of its drafts count: a drafter that cannot vary may make more than the setting says."""
        return self.longest if self.fixed is None else self.fixed
