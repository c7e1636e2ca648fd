"""How many tokens the model's own drafter makes in a step: as many as they yield for what they cost, down to none.

The drafter runs for the whole batch: a first pass over what was computed, and then a pass a token. What its tokens
gain depends on what the server knows of the same requests, so the gain is learned by how sure the server is of its
first token; how many requests stand at each level is known in every step, also while the drafter rests. The gain of
the server's being silent everywhere is that of a first epoch.

A drafter that rests makes not even its first pass, in which it computes the keys and values that later passes look at.
So requests that lived through a rest of many steps get no drafts of the model any more (they would be poor), and it is
waked for those that come. A rest is ended by what the levels promise, or, at growing distances, to see whether the
drafter has become better.

What the drafter costs is learned elsewhere, from steps that differ. So now and then it makes a token less or more than
it should, or rests for a step.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..cost import DrafterCost
from .choice import Gains
from .outcomes import SILENT, SIZE

REST = -1
"""For the number of tokens: the drafter makes no pass at all."""

TRIAL = 48  # steps that the drafter is given, at first and after a rest, before it may rest
SOONEST, LATEST = 1024, 32768  # steps of a rest until it is waked to look again
VARY = 4, 64  # every so many steps the number varies: while the drafter's cost is not known, and later
LEAVE_OUT = 16, 128  # and so many from one step without the drafter to the next
WEIGH = 8  # steps for which a number holds
FEW = 16  # steps that may be missing of a request
STALE = 32  # steps without the server's drafts, after which its levels are counted anew
NO_PROMPT = 1 << 20  # a missing prompt counts as so many
MEMORY = 2048.0  # requests after which what was learned of a level counts half
LATELY = 0.97  # a step's share in the levels of today: of the last thirty or so
STARTING = 3  # tokens
STARTING_COST = DrafterCost(first_pass=0.1, token=0.05)


class Amount:
    """Chooses the number for each step. Not thread-safe."""

    def __init__(self, longest: int, fixed: int | None, may_vary: bool, may_rest: bool) -> None:
        """How the drafter may be asked.

        Args:
            longest: tokens that it can make.
            fixed: tokens that it always makes; None: what pays.
            may_vary: it makes as many as the step says; otherwise always `longest`.
            may_rest: a step can leave it out.
        """
        self._longest = longest
        self._fixed = fixed
        self._may_vary, self._may_rest = may_vary, may_rest
        self._levels = np.zeros(SIZE)  # share of the requests at each: sums that forget,
        self._levels_seen = 0.0  # and what all of them sum to
        self._levels_at = 0  # the step that was counted last
        self._gain = np.zeros((SIZE, longest))
        self._seen = np.zeros((SIZE, longest))
        self._step = 0
        self._found = -WEIGH, 0, 0.0, True  # when the best number was looked for; it, its net gain; beside the server
        self._since = 0  # when it was waked or laid to rest
        self._resting = fixed == 0 and may_rest
        self._patience = SOONEST
        self._missed: dict[str, int] = {}  # steps of a request without the drafter's first pass
        self._left_out = False  # prompts, since the cache was last emptied

    @property
    def most(self) -> int:
        """Tokens of its drafts that are looked at: a drafter that cannot vary may make more than were set."""
        return self._longest if self._fixed is None else self._fixed

    @property
    def told(self) -> bool:
        """Whether vLLM's workers make as many tokens as a step says, or rest; else they always make `longest`."""
        return self._may_vary or self._may_rest

    def next(
        self, cost: DrafterCost | None, speed_up: float, prompts: bool, server: bool = True, pause: bool = False
    ) -> int:
        """The tokens to make in the step that begins, or REST.

        Args:
            cost: of the drafter; None: not known yet.
            speed_up: tokens for the price of a plain step, as things are.
            prompts: the step computes some.
            server: it is asked for drafts in these steps, too.
            pause: the drafter is to be left out, if it can be, to see what the server's drafts give without it.
        """
        self._step += 1
        if self._fixed is not None:
            return REST if self._resting else self._fixed if self._may_vary else self._longest
        if self._step - self._found[0] >= WEIGH or server is not self._found[3]:
            first, token = STARTING_COST if cost is None else cost
            self._found = self._step, *self._best(first * speed_up, token * speed_up, server), server
        _, most, net, _ = self._found
        age = self._step - self._since
        if self._resting:
            if net > 0 or age >= self._patience:
                self._turn()
        elif net > 0 and age >= TRIAL:
            self._patience = SOONEST
        elif net <= 0 and age >= TRIAL and self._may_rest:
            self._patience = min(2 * self._patience, LATEST)
            self._turn()
        if self._resting or (pause and self._may_rest and not prompts):
            return REST
        if not self._may_vary:
            return self._longest
        if age < TRIAL:
            most = max(most, STARTING)
        known = cost is not None
        if self._step % LEAVE_OUT[known] == 0 and self._may_rest and not prompts:
            return REST
        turn, rest = divmod(self._step, VARY[known])
        if rest == 0:
            most += 1 if turn % 2 else -1
        return max(1 if net > 0 or age < TRIAL else 0, min(most, self._longest))

    def saw(self, gains: Gains, whole: NDArray[np.bool_]) -> None:
        """What the drafts of a step gain. `whole`: bool[B], of requests that the drafter has seen whole."""
        width = gains.gain.shape[1]
        level, gain = gains.level[whole], gains.gain[whole]
        if not width or not len(level):
            return
        keep = 0.5 ** (len(level) / MEMORY)
        self._seen[:, :width] *= keep
        seen = np.bincount(level, minlength=SIZE).astype(np.float64)
        self._seen[:, :width] += seen[:, None]
        for j in range(width):
            total = np.bincount(level, gain[:, j], minlength=SIZE)
            at = seen > 0
            self._gain[at, j] += (total[at] - seen[at] * self._gain[at, j]) / self._seen[at, j]

    def saw_levels(self, level: NDArray[np.int64]) -> None:
        """How sure the server was of the first token of each request, int[B], in a step in which it was asked."""
        if len(level):
            if self._step - self._levels_at > STALE:
                self._levels[:] = self._levels_seen = 0.0
            self._levels_at = self._step
            self._levels += (1 - LATELY) * (np.bincount(level, minlength=SIZE) / len(level) - self._levels)
            self._levels_seen += (1 - LATELY) * (1 - self._levels_seen)

    def left_out(self, requests: Mapping[str, bool]) -> None:
        """A step without the drafter's first pass, of these requests: whether it computed a part of their prompts."""
        for request, prompt in requests.items():
            self._missed[request] = self._missed.get(request, 0) + (NO_PROMPT if prompt else 1)
            self._left_out |= prompt

    def cached(self, request: str) -> None:
        """A prompt was found in the cache, in part: the drafter may have rested when it was computed."""
        if self._left_out:
            self._missed[request] = NO_PROMPT

    def emptied(self) -> None:
        """The cache of prompts is empty."""
        self._left_out = False

    def whole(self, request: str) -> bool:
        """Whether the drafter has made a pass over the request's text, but for little of it."""
        return self._missed.get(request, 0) <= FEW

    def forget(self, request: str) -> None:
        """The request has left."""
        self._missed.pop(request, None)

    def _turn(self) -> None:
        self._resting, self._since = not self._resting, self._step

    def _best(self, first: float, token: float, server: bool) -> tuple[int, float]:
        """The number of tokens with the highest net gain a request, and that gain; prices in tokens."""
        levels = self._levels / self._levels_seen if server and self._levels_seen else np.eye(SIZE)[SILENT]
        gain = levels @ self._gain
        depth = int((levels @ self._seen > 1).sum())  # of what has been seen
        if not depth:
            return min(STARTING, self._longest), 0.0
        gain = gain[:depth]
        if 1 <= depth < self._longest:  # one more than was ever seen gains less than the last
            last = gain[-1] - (gain[-2] if depth > 1 else 0.0)
            gain = np.append(gain, gain[-1] + 0.8 * last)
        net = gain - first - token * np.arange(1, len(gain) + 1)
        best = int(net.argmax())
        return best + 1, float(net[best])
