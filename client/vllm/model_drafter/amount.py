"""Decides how many tokens the model's own drafter makes in a step: the number with the best net gain, or none.

The drafter runs for the whole batch: a first pass over the step's tokens, and then one pass per token. The gain of its
tokens depends on what the server knows of the same requests. So the gain is learned by level: the server's estimate of
its first token. The share of requests at each level is known in every step, also while the drafter rests. If the server
has no drafts at all, as in a first epoch, only the gain at the lowest level counts.

A resting drafter also skips its first pass, which computes the keys and values that later passes read. Its drafts for
requests that ran during a rest of many steps would be poor, so these get none any more. It wakes up for new requests. A
rest ends when the levels promise a gain, or, at growing intervals, to check whether the drafter has become better. As a
rest spoils the drafts of all running requests, a gain or loss that may be noise has to add up first (a cumulative sum;
E. S. Page, "Continuous Inspection Schemes", Biometrika 1954).

Another module learns the cost of the drafter, for which steps have to differ. So the drafter sometimes makes one token
less or more than it should, or rests for a step.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..cost import DrafterCost
from .choice import Gains
from .outcomes import SILENT, SIZE

REST = -1
"""As the number of tokens: the drafter makes no pass at all."""

TRIAL = 48  # steps that the drafter works, at first and after a rest, before it may rest
SOONEST, LATEST = 1024, 32768  # steps of a rest before the drafter is tried again: the first rest, and the longest
VARY = 4, 64  # steps between two changes of the number: while the drafter's cost is unknown, and later
LEAVE_OUT = 16, 128  # steps from one step without the drafter to the next, likewise
WEIGH = 8  # steps for which a number holds
ENOUGH = 1.0  # sum of net gains, one per number, at which the drafter wakes up; it rests at minus ENOUGH
FEW = 16  # steps of a request that the drafter may have missed
STALE = 32  # steps without the server's drafts after which its levels are counted from zero
NO_PROMPT = 1 << 20  # a missed prompt counts as this many steps
MEMORY = 2048.0  # requests after which old results of a level count half
LATELY = 0.97  # weight of the older steps in the present levels, which are those of about thirty steps
STARTING = 3  # tokens
STARTING_COST = DrafterCost(first_pass=0.1, token=0.05)


class Amount:
    """Chooses the number for each step. Not thread-safe."""

    def __init__(self, longest: int, fixed: int | None, may_vary: bool, may_rest: bool) -> None:
        """Takes the limits of the drafter.

        Args:
            longest: the most tokens that it can make.
            fixed: the number of tokens that it always makes; None: the number that pays.
            may_vary: the drafter makes as many tokens as the step says; otherwise always `longest`.
            may_rest: a step can leave the drafter out.
        """
        self._longest = longest
        self._fixed = fixed
        self._may_vary, self._may_rest = may_vary, may_rest
        self._levels = np.zeros(SIZE)  # share of the requests at each level: decaying sums,
        self._levels_seen = 0.0  # and their total
        self._levels_at = 0  # the last step that was counted
        self._gain = np.zeros((SIZE, longest))
        self._seen = np.zeros((SIZE, longest))
        self._step = 0
        self._found = -WEIGH, 0, 0.0, True  # step of the last search, best number, its net gain, `server`
        self._since = 0  # the step in which the drafter last woke up or began to rest
        self._evidence = 0.0  # sum of the net gains since then, within ENOUGH
        self._resting = fixed == 0 and may_rest
        self._patience = SOONEST
        self._missed: dict[str, int] = {}  # by request: steps without the drafter's first pass
        self._left_out = False  # whether it missed prompts since the cache was last emptied

    @property
    def most(self) -> int:
        """How many tokens of its drafts count: a drafter that cannot vary may make more than the setting says."""
        return self._longest if self._fixed is None else self._fixed

    @property
    def told(self) -> bool:
        """Whether vLLM's workers follow the number in a step, or its REST; else they always make `longest`."""
        return self._may_vary or self._may_rest

    def next(
        self, cost: DrafterCost | None, speed_up: float, prompts: bool, server: bool = True, pause: bool = False
    ) -> int:
        """Returns the number of tokens to make in the step that begins, or REST.

        Args:
            cost: the cost of the drafter; None: not known yet.
            speed_up: tokens for the price of a step without drafts, at present.
            prompts: the step computes prompts.
            server: the server is also asked for drafts in these steps.
            pause: leave the drafter out if possible, to measure the server's drafts without it.
        """
        self._step += 1
        if self._fixed is not None:
            return REST if self._resting else self._fixed if self._may_vary else self._longest
        if self._step - self._found[0] >= WEIGH or server is not self._found[3]:
            first, token = STARTING_COST if cost is None else cost
            self._found = self._step, *self._best(first * speed_up, token * speed_up, server), server
            self._evidence = min(max(self._evidence + self._found[2], -ENOUGH), ENOUGH)
        _, most, net, _ = self._found
        age = self._step - self._since
        if self._resting:
            if self._evidence >= ENOUGH or age >= self._patience:
                self._turn()
        elif net > 0 and age >= TRIAL:
            self._patience = SOONEST
        elif self._evidence <= -ENOUGH and age >= TRIAL and self._may_rest:
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
        """Learns from the gain of a step's drafts. `whole`: bool[B], the requests whose text the drafter has seen."""
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
        """Takes the level of the server's first token for each request, int[B], of a step that asked the server."""
        if len(level):
            if self._step - self._levels_at > STALE:
                self._levels[:] = self._levels_seen = 0.0
            self._levels_at = self._step
            self._levels += (1 - LATELY) * (np.bincount(level, minlength=SIZE) / len(level) - self._levels)
            self._levels_seen += (1 - LATELY) * (1 - self._levels_seen)

    def left_out(self, requests: Mapping[str, bool]) -> None:
        """Notes a step without the drafter's first pass: its requests, and whether it read part of their prompts."""
        for request, prompt in requests.items():
            self._missed[request] = self._missed.get(request, 0) + (NO_PROMPT if prompt else 1)
            self._left_out |= prompt

    def cached(self, request: str) -> None:
        """Notes that part of a prompt came from the cache: the drafter may have rested when it was computed."""
        if self._left_out:
            self._missed[request] = NO_PROMPT

    def emptied(self) -> None:
        """Notes that the cache of prompts is empty."""
        self._left_out = False

    def whole(self, request: str) -> bool:
        """Returns whether the drafter has made a pass over the request's text, except for at most FEW steps."""
        return self._missed.get(request, 0) <= FEW

    def forget(self, request: str) -> None:
        """Removes a request that has left."""
        self._missed.pop(request, None)

    def _turn(self) -> None:
        self._resting, self._since, self._evidence = not self._resting, self._step, 0.0

    def _best(self, first: float, token: float, server: bool) -> tuple[int, float]:
        """Returns the number of tokens with the highest net gain per request, and that gain. Prices are in tokens."""
        levels = self._levels / self._levels_seen if server and self._levels_seen else np.eye(SIZE)[SILENT]
        gain = levels @ self._gain
        depth = int((levels @ self._seen > 1).sum())  # the longest number with results
        if not depth:
            return min(STARTING, self._longest), 0.0
        gain = gain[:depth]
        if 1 <= depth < self._longest:  # estimate one token more than was ever tried: it gains less than the last
            last = gain[-1] - (gain[-2] if depth > 1 else 0.0)
            gain = np.append(gain, gain[-1] + 0.8 * last)
        net = gain - first - token * np.arange(1, len(gain) + 1)
        best = int(net.argmax())
        return best + 1, float(net[best])
