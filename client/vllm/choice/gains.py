"""Learns what the tokens of the model's own drafter add to the server's drafts.

The gain depends on what the server knows of the same requests. So it is learned by level: the server's estimate of its
first token.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.vllm.choice.drafts import Gains
from histospec.client.vllm.choice.outcomes import SILENT, SIZE

MEMORY = 2048.0  # requests after which old results of a level count half
LATELY = 0.97  # weight of the older steps in the present levels, which are those of about thirty steps
STARTING = 3  # tokens
FADE = 0.1
ENOUGH = 32.0  # results from which on the gain is known
LESS = 0.8  # gain of a token that was never tried, relative to that of the token before


class Best(NamedTuple):
    """The number of tokens with the best net gain.

    Attributes:
        tokens: the number.
        net: expected tokens that it adds for each request, less their verification and the price of drafting.
        known: whether there are results.
    """

    tokens: int
    net: float
    known: bool = True


def best(gain: NDArray[np.float64], first: float, token: float) -> Best:
    """Returns the best number of tokens for the price of the drafter, in tokens per request.

    Args:
        gain: float[K], the gain of the first 1, 2, … tokens.
        first: the price of the drafter's first pass.
        token: the price of each token that it makes.
    """
    net = gain - first - token * np.arange(1, len(gain) + 1)
    at = int(net.argmax())
    return Best(at + 1, float(net[at]))


class LevelGains:
    """The gain of the drafter's first 1, 2, … tokens, by level. Not thread-safe."""

    def __init__(self, longest: int) -> None:
        """`longest`: the most tokens that the drafter can make."""
        self._longest = longest
        self._gain = np.zeros((SIZE, longest))
        self._seen = np.zeros((SIZE, longest))
        self.forget_levels()

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
            self._levels += (1 - LATELY) * (np.bincount(level, minlength=SIZE) / len(level) - self._levels)
            self._levels_seen += (1 - LATELY) * (1 - self._levels_seen)

    def fade(self) -> None:
        """Lets old results count little."""
        self._seen *= FADE

    def forget_levels(self) -> None:
        """Forgets at which levels the requests are: other requests follow."""
        self._levels = np.zeros(SIZE)  # share of the requests at each level: decaying sums,
        self._levels_seen = 0.0  # and their total

    def best(self, first: float, token: float) -> Best:
        """Returns the best number of tokens that the drafter adds to the server's; for the prices, see `best`."""
        levels = self._levels / self._levels_seen if self._levels_seen else np.eye(SIZE)[SILENT]
        gain = levels @ self._gain
        depth = int((levels @ self._seen > 1).sum())  # the longest number with results
        if not depth:
            tokens = min(STARTING, self._longest)
            return Best(tokens, -first - token * tokens, known=False)
        gain = gain[:depth]
        if depth < self._longest:
            last = gain[-1] - (gain[-2] if depth > 1 else 0.0)
            gain = np.append(gain, gain[-1] + LESS * last)
        return best(gain, first, token)._replace(known=bool(levels @ self._seen[:, 0] > ENOUGH))
