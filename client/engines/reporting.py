"""Makes one log line per minute, and one at the end: the gain and the cost of drafts for an engine that generates.

A step of a request yields one token, and one more for each accepted draft token. The estimated speed-up does not
include the waits for drafts.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence

from histospec.protocol.costs import speedup

MINUTE = 60.0
WAITS = 4096  # how many waits are kept for their quantiles; sorting them takes less than a millisecond


class MinuteReport:
    """Counts an engine's steps and drafts. An idle engine makes no steps, and gets no lines."""

    def __init__(self) -> None:
        self._since: float | None = None  # start of the minute, on the monotonic clock
        self._waits: deque[float] = deque(maxlen=WAITS)
        self._left_out: Counter[str] = Counter()  # requests without a session, by what they do
        self._clear()

    def _clear(self) -> None:
        self._seconds = 0.0
        self._steps = self._generated = self._drafted = self._asked = self._answered = 0
        self._waits.clear()
        self._left_out.clear()

    def left_out(self, why: str) -> None:
        """Counts a request without a session. `why`: what such requests do, in words that end a line of the log."""
        self._left_out[why] += 1

    def stepped(self, seconds: float, sampled: Sequence[Sequence[int]], drafted: int) -> None:
        """Counts a step of the engine.

        Args:
            seconds: duration of the step; plus or minus infinity if the engine was idle before.
            sampled: the tokens that each request of the batch got.
            drafted: how many drafted tokens the step verified.
        """
        if math.isfinite(seconds):
            self._seconds += seconds
        self._steps += sum(map(bool, sampled))
        self._generated += sum(map(len, sampled))
        self._drafted += drafted

    def received(self, seconds: float, asked: int, drafts: list[list[int]]) -> None:
        """Counts the drafts of a step.

        Args:
            seconds: how long the engine waited for them.
            asked: how many requests asked for one.
            drafts: the drafts; those that did not arrive are empty.
        """
        self._waits.append(seconds)
        self._asked += asked
        self._answered += len(drafts) - drafts.count([])

    def line(self, now: float, verify_cost: float | None = None, learned: bool = False) -> str | None:
        """Returns the line if a minute has passed since the last one and there were steps; else None.

        Args:
            now: time on the monotonic clock.
            verify_cost: the present cost of verifying a drafted token, in units of a step without drafts. None: it is
                not known; the line says nothing of cost and speed-up.
            learned: whether this cost was measured.
        """
        if self._since is None:
            self._since = now
        if now - self._since < MINUTE or not self._steps:
            return None
        self._since = now
        return self.rest(verify_cost, learned)

    def rest(self, verify_cost: float | None = None, learned: bool = False) -> str | None:
        """Returns the line of the steps since the last line, if there were any; else None. The arguments are as above.

        At the end of an engine, so that a trial of less than a minute shows a line, too.
        """
        if not self._steps:
            return None
        steps, generated, drafted = self._steps, self._generated, self._drafted
        parts = [f"{generated / steps:.2f} tokens per step of a request"]
        if drafted:
            parts.append(f"{(generated - steps) / drafted:.0%} of {drafted} drafted tokens accepted")
        if self._asked:
            parts.append(f"drafts for {self._answered / self._asked:.0%} of the requests that asked")
        else:
            parts.append("no drafts asked for")
        if verify_cost is not None:
            parts.append(f"verify cost {verify_cost:.3f} ({'measured' if learned else 'assumed'})")
        if self._waits:
            waits = sorted(1000 * wait for wait in self._waits)
            late = waits[math.ceil(0.99 * len(waits)) - 1]
            parts.append(f"waited for drafts {statistics.fmean(waits):.1f} ms per step (p99 {late:.1f} ms)")
        if verify_cost is not None:
            parts.append(f"estimated speed-up {speedup(generated, steps, drafted, verify_cost):.2f}")
        if self._left_out:
            kinds = ", ".join(f"{number} {why}" for why, number in self._left_out.items())
            parts.append(f"without a session: {kinds}")
        line = f"HistoSpec: in {self._seconds:.0f} s of generating {', '.join(parts)}"
        self._clear()
        return line
