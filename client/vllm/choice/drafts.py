"""Chooses which of two drafts of a request is verified: the one with more expected accepted tokens, less its price.

A drafted token is worth verifying if `survival >= verify_cost * speed_up` (docs/design.md): an accepted token saves a
step, which at present yields `speed_up` tokens for its price. So a draft is worth the sum of its survivals, less that
price for each token, and is cut where it is worth most. Tokens that both drafts share count for both.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.vllm.choice.outcomes import Outcomes, Pairs, levels

if TYPE_CHECKING:
    from histospec.client import Draft


TOGETHER = 64  # drafts of the model alone that are learned from together


class Row(NamedTuple):
    """The draft chosen for a request.

    Attributes:
        tokens: the draft, which vLLM may still cut.
        shared: how many of the tokens, from the first on, the server drafted, too.
        by_model: the rest is the model's; False: the whole draft is the server's.
    """

    tokens: list[int]
    shared: int
    by_model: bool


class Gains(NamedTuple):
    """What the model's drafts add to those of the server.

    Attributes:
        level: int[B], the level of the server's estimate of its first token.
        gain: float[B, K], the additional expected tokens, less their verification, if the model drafts 1 to K tokens.
    """

    level: NDArray[np.int64]
    gain: NDArray[np.float64]


class _Offer(NamedTuple):
    row_of: Mapping[str, int]
    pairs: Pairs
    by_model: NDArray[np.bool_]


class Choice:
    """Chooses drafts, and learns from the tokens that followed. Not thread-safe."""

    def __init__(self, longest: int) -> None:
        """Takes the length of the longest draft."""
        self.outcomes = Outcomes(longest)
        self._offer: _Offer | None = None
        self._alone: list[tuple[int, int, bool]] = []  # to learn from, if only the model drafted
        self._depth: int | None = None  # how many of its tokens to verify then; None: to be computed
        self._runs: dict[str, bool] = {}  # whether the request's last draft was accepted to its end

    def choose(
        self, requests: Sequence[str], history: Sequence["Draft | None"], model: Sequence[Sequence[int]], price: float
    ) -> tuple[list[Row], Gains]:
        """Returns the better draft of each request, and the gain of the model's drafts.

        Args:
            requests: the ids of B requests.
            history: the server's drafts.
            model: the drafts of the model's own drafter.
            price: the price of verifying a token, in tokens: verify_cost * speed_up.
        """
        pairs = self._pairs(requests, history, model)
        width = pairs.history.shape[1]
        column, split = np.arange(width), pairs.split[:, None]
        shared = np.where(column < split, self.outcomes.agreed(pairs.probs), 1.0).prod(axis=1)
        history_right, model_right = self.outcomes.at_split(pairs)
        going_on = np.ones(width)
        known = self.outcomes.goes_on[:width]
        going_on[: len(known)] = known
        kept_history = _worth(column, split, shared * history_right, pairs.probs, pairs.history >= 0, price)
        kept_model = _worth(column, split, shared * model_right, going_on[None, :], pairs.model >= 0, price)
        by_model = kept_model.max(axis=1, initial=0.0) > kept_history.max(axis=1, initial=0.0)

        rows = []
        for i, chosen in enumerate(by_model.tolist()):
            tokens, worth = (pairs.model[i], kept_model[i]) if chosen else (pairs.history[i], kept_history[i])
            end = int(pairs.split[i])
            if worth.max() > 0:
                end = int(worth.argmax()) + 1
            rows.append(Row(tokens[:end].tolist(), min(int(pairs.split[i]), end), chosen))
        self._depth = None
        self._offer = _Offer({request: i for i, request in enumerate(requests)}, pairs, by_model)
        longest = max(map(len, model), default=0)
        best = np.maximum.accumulate(kept_model[:, :longest], axis=1)
        gain = np.maximum(best - np.maximum(kept_history.max(axis=1), 0.0)[:, None], 0.0)
        return rows, Gains(levels(pairs.probs[:, 0]), gain)

    def alone(self, model: Sequence[Sequence[int]], price: float) -> list[list[int]]:
        """Returns the drafts of the model's drafter, cut where they are worth most: the server has none.

        All have one length then. It is computed after some requests only, as `learn_alone` learns.
        """
        if self._depth is None:
            worth = self.outcomes.alone(price)
            self._depth = int(worth.argmax()) + 1 if worth.max() > 0 else 0
        self._offer = None
        return [list(draft[: self._depth]) for draft in model]

    def learn_alone(self, request: str, verified: int, accepted: int) -> None:
        """Learns from the verified tokens of a draft that `alone` returned, and from how many were accepted."""
        self._alone.append((verified, accepted, self._runs.get(request, False)))
        self._runs[request] = 0 < verified <= accepted
        if len(self._alone) >= TOGETHER:
            self.outcomes.learn_alone(*np.array(self._alone, np.int64).T)
            self._alone.clear()
            self._depth = None

    def learn(self, requests: Sequence[str], came: Sequence[Sequence[int]], rows: Mapping[str, Row]) -> None:
        """Learns from the tokens that followed the last chosen drafts. Ignores other requests."""
        for request, tokens in zip(requests, came, strict=False):
            if tokens:
                row = rows.get(request)
                self._runs[request] = row is not None and len(tokens) > len(row.tokens) > 0
        offer, self._offer = self._offer, None
        if offer is None:
            return
        both = [(i, t) for r, t in zip(requests, came, strict=False) if t and (i := offer.row_of.get(r)) is not None]
        if not both:
            return
        at = np.array([i for i, _ in both])
        width = offer.pairs.history.shape[1]
        padded = np.full((len(both), width), -3, np.int32)
        for i, (_, tokens) in enumerate(both):
            padded[i, : len(tokens)] = tokens[:width]
        lengths = np.array([min(len(tokens), width) for _, tokens in both])
        self.outcomes.learn(Pairs(*(field[at] for field in offer.pairs)), padded, lengths, offer.by_model[at])

    def forget(self, request: str) -> None:
        """Removes a request that has left."""
        self._runs.pop(request, None)

    def _pairs(
        self, requests: Sequence[str], history: Sequence["Draft | None"], model: Sequence[Sequence[int]]
    ) -> Pairs:
        longest = max(max(map(len, model), default=0), max((len(d) for d in history if d is not None), default=0))
        shape = len(requests), longest + 1  # one column more than the longest draft
        ours, theirs = np.full(shape, -1, np.int32), np.full(shape, -2, np.int32)
        probs = np.zeros(shape, np.float32)
        for i, draft in enumerate(history):
            if draft is not None and (n := len(draft)):
                ours[i, :n], probs[i, :n] = draft.tokens, draft.probs
        for i, tokens in enumerate(model):
            theirs[i, : len(tokens)] = tokens
        split = np.argmax(ours != theirs, axis=1)
        run = np.array([self._runs.get(request, False) for request in requests], np.int64)
        return Pairs(ours, probs, theirs, split, levels(probs[np.arange(len(split)), split]), run)


def _worth(
    column: NDArray[np.int64], split: NDArray[np.int64], first: NDArray[np.float64],
    then: NDArray[np.float32] | NDArray[np.float64], there: NDArray[np.bool_], price: float,
) -> NDArray[np.float64]:  # fmt: skip
    """Returns float[B, W]: the worth of a draft that ends at each position from the dividing one on; else -inf."""
    chances = np.where(column < split, 1.0, np.where(column == split, first[:, None], then))
    behind = (column >= split) & there
    worth = np.where(behind, np.cumprod(chances, axis=1) - price, 0.0).cumsum(axis=1)
    return np.where(behind, worth, -np.inf)
