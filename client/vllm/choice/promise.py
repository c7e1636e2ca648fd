"""What drafts promise by the server's own estimate, whether or not a step verifies them."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from histospec.client import Draft


MEMORY = 4  # promises


class Promise(NamedTuple):
    """Means over the requests of a batch.

    Attributes:
        tokens: what a step would yield that verifies the drafts: one token, and those accepted.
        drafted: tokens of a draft.
    """

    tokens: float
    drafted: float

    def after(self, before: "Promise | None") -> "Promise":
        """Returns the mean of this promise and the latest ones, whose mean was `before`; None: it is the first."""
        if before is None:
            return self
        return Promise(*(old + (new - old) / MEMORY for old, new in zip(before, self, strict=True)))


def promise_of(drafts: "Collection[Draft]") -> Promise:
    """Returns what the drafts of a batch promise; it must have a request.

    The server estimates for each token the probability that it is accepted if all tokens before it are. So a draft
    yields the sum of the products of its first 1, 2, ... probabilities.
    """
    accepted = sum(float(draft.probs.cumprod().sum()) for draft in drafts)
    return Promise(1 + accepted / len(drafts), sum(map(len, drafts)) / len(drafts))
