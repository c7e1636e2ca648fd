"""How many places each request gets in a step whose drafts do not exist yet.

When step k is scheduled, step k-1 still runs, so the server cannot know the text that step k continues. But drafts are
much alike from step to step: after a whole draft of likely tokens another one follows, and after an empty one seldom
anything. So requests are sorted by what is known of them: the length of the newest draft, its probability to be
accepted as a whole, and what was accepted of it. For each such class, the mean survival of the drafts that followed is
learned, place by place. A place is reserved if its mean survival pays for its verification: the rule by which the
server ends a draft, with an expected survival instead of a known one.

All drafts teach, also those that no place was reserved for. So a class starts without places.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEMORY = 512.0  # drafts over which the mean of a class is taken
SOME = 1e-6  # a survival from which on a place is reserved if places cost nothing
ENOUGH = 16.0  # drafts after which a class is known

LENGTHS = (1, 3, 5, 9, 13)  # the least lengths of the kinds of drafts; a draft as long as allowed is a kind of its own
SURVIVALS = (0.1, 0.3, 0.6, 0.85)  # limits between kinds of probabilities that a whole draft is accepted
EMPTY = (1, 2, 4, 8)  # the least numbers of empty drafts in a row
OUTCOMES = 3  # nothing known of what was accepted of the draft; all of it; less

_DRAFTS = (len(LENGTHS) + 1) * (len(SURVIVALS) + 1) * OUTCOMES
CLASSES = 1 + 2 * len(EMPTY) + _DRAFTS
NEW = 0
"""The class of a request without an answer."""


@dataclass(slots=True)
class Newest:
    """The newest draft of a request.

    Attributes:
        end: the length of the text that it continues.
        length: its tokens.
        survival: the probability that all of them are accepted.
        empty: how many drafts in a row were empty, this one included.
    """

    end: int
    length: int
    survival: float
    empty: int


class DraftPlaces:
    """Learns the survival of drafts from the answers of the server. Not thread-safe."""

    def __init__(self, longest: int) -> None:
        """`longest`: the most tokens of a draft."""
        self._longest = longest
        self._survival = np.zeros((CLASSES, longest))
        self._seen = np.zeros(CLASSES)
        self._newest: dict[str, Newest] = {}

    def class_of(self, request: str, generated: int) -> int:
        """Returns the class of a request of which so many generated tokens are known."""
        newest = self._newest.get(request)
        if newest is None:
            return NEW
        since = generated - newest.end
        if not newest.length:
            kind = sum(newest.empty >= least for least in EMPTY) - 1
            return 1 + 2 * kind + (since > 0)
        length = len(LENGTHS) if newest.length >= self._longest else sum(newest.length >= n for n in LENGTHS) - 1
        survival = sum(newest.survival >= limit for limit in SURVIVALS)
        outcome = 0 if since <= 0 else 1 if since > newest.length else 2
        return 1 + 2 * len(EMPTY) + (length * (len(SURVIVALS) + 1) + survival) * OUTCOMES + outcome

    def learn(
        self, classes: Sequence[int | None], requests: Sequence[str], ends: Sequence[int],
        lengths: Sequence[int], probs: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Takes the drafts of a step.

        Args:
            classes: the class of each request when its places were reserved; None if it is not known.
            requests: their ids.
            ends: the length of the text that each draft continues.
            lengths: the tokens of each draft.
            probs: the probabilities of all their tokens.
        """
        survival = np.zeros((len(requests), self._longest))
        start = 0
        for row, (request, end, length) in enumerate(zip(requests, ends, lengths, strict=True)):
            used = min(length, self._longest)
            survival[row, :used] = probs[start : start + used].cumprod()
            start += length
            before = self._newest.get(request)
            if before is None or end >= before.end:
                empty = 0 if length else 1 if before is None else before.empty + 1
                whole = float(survival[row, used - 1]) if used else 0.0
                self._newest[request] = Newest(end, length, whole, empty)
        known = np.array([-1 if each is None else each for each in classes], np.int64)
        for each in np.unique(known[known >= 0]):
            rows = survival[known == each]
            self._seen[each] = min(self._seen[each] + len(rows), MEMORY)
            share = min(1.0, len(rows) / self._seen[each])
            self._survival[each] += share * (rows.mean(axis=0) - self._survival[each])

    def numbers(self, price: float) -> NDArray[np.int64]:
        """Returns the places that pay, for each class. `price`: of a place, in tokens that its time would yield."""
        least = price if price > 0 else SOME
        numbers: NDArray[np.int64] = (self._survival >= least).sum(axis=1)
        return numbers

    def known(self, classes: Iterable[int]) -> bool:
        """Returns whether enough drafts were seen of all these classes."""
        return all(self._seen[each] >= ENOUGH for each in classes)

    def keep_only(self, requests: Iterable[str]) -> None:
        """Forgets all other requests; what was learned from them stays."""
        kept = {request: self._newest[request] for request in requests if request in self._newest}
        self._newest = kept

    def forget(self, request: str) -> None:
        """Forgets a request; what was learned from it stays."""
        self._newest.pop(request, None)
