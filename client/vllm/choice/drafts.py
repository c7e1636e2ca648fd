"""Chooses which of two drafts of a request is verified: the one with more expected accepted tokens, less its price.

A drafted token is worth verifying if `survival >= verify_cost * speed_up` (docs/design.md): an accepted token saves a
step, which at present yields `speed_up` tokens for its price. So a draft is worth the sum of its survivals, less that
price for each token, and is cut where it is worth most. Tokens that both drafts share count for both.

A draft of the server (H) and one of the model (M) share their first tokens and then divide. Up to there it does not
matter which is verified. At the dividing position at most one of them is right. Which one depends on the server's
estimated probability, in a few levels, and on whether the request's last draft was accepted to the end. `Outcomes`
counts how often each draft is right, by these two. It also learns how often tokens are right on which both agree, and
how often the model's next token is right after a right one.

The policy samples the token at a position, whichever draft is verified. The step shows that token if all tokens before
it were accepted, whether or not it was drafted itself. So every step teaches about both drafts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from histospec.client import Draft

LEVELS = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97])
"""Bounds between the levels of the server's estimate. At level 0 the server has no token for that position."""
SILENT = 0
SIZE = len(LEVELS) + 2  # levels

OUTCOME_MEMORY = 4096.0  # observations after which old ones count half
FADE = 0.1  # weight of old results when the drafter begins to work again: it may have become better
PRIOR = 6.0  # observations that the starting values count for
TOGETHER = 64  # drafts of the model alone that are learned from together
START_SILENT = 0.5  # starting probability of the model's token if the server has none,
START_OTHER = 0.3  # if the server drafts another token,
START_NEXT = 0.8  # and after a right token of the model: high, so that longer drafts are tried


class Pairs(NamedTuple):
    """The two drafts of each request of a batch; B requests, padded to a common width W.

    Attributes:
        history: int32[B, W], the server's drafts; -1 after the end.
        probs: float32[B, W], the server's estimate of each token if all before are right; 0 after the end.
        model: int32[B, W], the drafts of the model's own drafter; -2 after the end.
        split: int[B], how many tokens both share from the first on.
        level: int[B], the level of the server's estimate at the dividing position.
        run: int[B], 1 if the request's last draft was accepted to the end.
    """

    history: NDArray[np.int32]
    probs: NDArray[np.float32]
    model: NDArray[np.int32]
    split: NDArray[np.int64]
    level: NDArray[np.int64]
    run: NDArray[np.int64]


class Outcomes:
    """Learns from every step. Not thread-safe."""

    def __init__(self, longest: int) -> None:
        """Takes the length of the model's longest draft."""
        shape = 2 * SIZE
        self._seen = np.full(shape, PRIOR)
        self._estimated = np.full(shape, PRIOR)  # sum of the server's probabilities; a prior that trusts them
        self._history_right = np.full(shape, PRIOR)
        start = np.full((2, SIZE), START_OTHER)
        start[:, SILENT] = START_SILENT
        self._model_right = PRIOR * start.ravel()
        self._agreed_wrong = self._agreed_doubt = PRIOR
        self._next_seen = np.full(longest + 1, PRIOR)
        self._next_right = np.full(longest + 1, PRIOR * START_NEXT)

    def at_split(self, pairs: Pairs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns two [B]: the probability that the token at the dividing position is the server's, and the model's."""
        cell = pairs.run * SIZE + pairs.level
        estimated = pairs.probs[np.arange(len(cell)), pairs.split]
        divided = pairs.model[np.arange(len(cell)), pairs.split] >= 0
        trusted = np.minimum(1.0, (self._history_right / self._estimated)[cell])
        history = estimated * np.where(divided, trusted, 1.0)
        model = np.where(divided, (self._model_right / self._seen)[cell], 0.0)
        return history, np.minimum(model, 1.0 - history)

    def agreed(self, probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the probabilities of tokens that both drafted: the server's, raised because the model agrees."""
        surer = min(1.0, self._agreed_wrong / self._agreed_doubt)
        return 1.0 - surer * (1.0 - probs.astype(np.float64))

    @property
    def goes_on(self) -> NDArray[np.float64]:
        """float[longest + 1]: probability that the model's token j is right, if j - 1 was and the server's was not."""
        goes_on: NDArray[np.float64] = self._next_right / self._next_seen
        return goes_on

    def alone(self, price: float) -> NDArray[np.float64]:
        """Returns float[longest]: what the model's first 1, 2, … tokens are worth if the server has none.

        `price`: of verifying a token, in tokens.
        """
        silent = slice(SILENT, None, SIZE)
        first = self._model_right[silent].sum() / self._seen[silent].sum()
        worth: NDArray[np.float64] = np.cumsum(np.cumprod(np.append(first, self.goes_on[1:-1])) - price)
        return worth

    def learn_alone(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64], run: NDArray[np.int64]) -> None:
        """Learns from a step in which only the model drafted.

        Args:
            drafted: int[B], the tokens that were verified of each request's draft.
            accepted: int[B], how many of them were accepted.
            run: as that of Pairs.
        """
        self._forget(len(drafted))
        cell = (run * SIZE + SILENT)[drafted > 0]
        self._seen += _count(cell)
        self._model_right += _count(cell, accepted[drafted > 0] > 0)
        for j in range(1, min(int(drafted.max(initial=0)), len(self._next_seen))):
            seen = (accepted >= j) & (drafted > j)
            self._next_seen[j] += seen.sum()
            self._next_right[j] += (seen & (accepted > j)).sum()

    def learn(
        self, pairs: Pairs, came: NDArray[np.int32], lengths: NDArray[np.int64], by_model: NDArray[np.bool_]
    ) -> None:
        """Learns from the tokens that followed the pairs.

        Args:
            pairs: the pairs of the B requests that gained tokens.
            came: int32[B, W], the tokens that followed; -3 after the end.
            lengths: int[B], how many tokens followed, at least 1.
            by_model: bool[B], whether the model's draft was verified.
        """
        self._forget(len(lengths))
        width = came.shape[1]
        # The first position at which each draft is wrong or has ended; a draft never fills the width.
        history_until = np.argmax(came != pairs.history, axis=1)
        model_until = np.argmax(came != pairs.model, axis=1)
        split, rows = pairs.split, np.arange(len(lengths))

        reached = (history_until >= split) & (lengths > split) & (pairs.model[rows, split] >= 0)
        cell = (pairs.run * SIZE + pairs.level)[reached]
        self._seen += _count(cell)
        self._estimated += _count(cell, pairs.probs[rows, split][reached])
        self._history_right += _count(cell, (history_until > split)[reached])
        self._model_right += _count(cell, (model_until > split)[reached])

        ends = np.minimum(np.minimum(history_until + 1, split), lengths)
        shared = np.arange(width) < ends[:, None]
        self._agreed_doubt += float(((1.0 - pairs.probs) * shared).sum())
        self._agreed_wrong += int(((history_until < split) & (history_until < lengths)).sum())

        followed = by_model & reached & (model_until > split)
        if followed.any():
            split, until, lengths, model = (
                split[followed],
                model_until[followed],
                lengths[followed],
                pairs.model[followed],
            )
            for j in range(1, min(width, len(self._next_seen))):
                seen = (split < j) & (until >= j) & (lengths > j) & (model[:, j] >= 0)
                self._next_seen[j] += seen.sum()
                self._next_right[j] += (seen & (until > j)).sum()

    def fade(self) -> None:
        """Lets old observations count little."""
        self._keep(FADE)

    def _forget(self, observations: int) -> None:
        self._keep(0.5 ** (observations / OUTCOME_MEMORY))

    def _keep(self, keep: float) -> None:
        for counts in (
            self._seen, self._estimated, self._history_right, self._model_right, self._next_seen, self._next_right
        ):  # fmt: skip
            counts *= keep
        self._agreed_doubt *= keep
        self._agreed_wrong *= keep


def levels(probs: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns the level of each of the server's estimates, float32[B]; SILENT for 0, which means no token."""
    return np.where(probs > 0, 1 + np.searchsorted(LEVELS, probs), SILENT)


def _count(
    cells: NDArray[np.int64], weights: NDArray[np.float32] | NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    return np.bincount(cells, weights, minlength=2 * SIZE).astype(np.float64)


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
