"""Where a token stands, as its noise knows it: behind which two tokens, and how often these stood in the text before.

Noise has to be fresh for every token of a response: what repeats in it must not draw the same again, or a loop would
never end. The position is fresh, too, but after one word more or less nothing is where it was; behind the same words
the noise is the same again (`benchmarks/vllm/noise_keys.py` compares them).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

WORD = 0xFFFFFFFF


class Places(NamedTuple):
    """Of the tokens that a request may get in this step: one a draft, and one behind them.

    Attributes:
        pairs: the two tokens before, each as 32 bits, in one int64; -1 where there is none.
        times: how often that pair stood before a token of the same text.
    """

    pairs: list[int]
    times: list[int]


@dataclass
class _Text:
    known: int = 0
    """Tokens of it that are counted."""
    seen: dict[int, int] = field(default_factory=dict)
    """By pair: how many of these tokens stand behind it."""


class Texts:
    """The texts of the running requests."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def places(self, requests: Iterable[tuple[str, Any, int, int]]) -> list[Places]:
        """The places of each request: its id, its tokens int32, how many of them are known, how many drafts follow.

        Requests that are missing are forgotten; one that comes back is counted anew, to the same effect.
        """
        before, self._texts = self._texts, {}
        found = []
        for request_id, tokens, known, drafted in requests:
            text = before.get(request_id, _Text())
            if text.known > known:  # vLLM took a step back
                text = _Text()
            self._texts[request_id] = text
            found.append(_places(text, tokens, known, drafted))
        return found


def _places(text: _Text, tokens: Any, known: int, drafted: int) -> Places:
    first, seen = text.known, text.seen
    window = [-1] * max(0, 2 - first) + tokens[max(0, first - 2) : known + drafted].tolist()
    pairs = [before << 32 | last & WORD for before, last in pairwise(window)]
    for pair in pairs[: known - first]:
        seen[pair] = seen.get(pair, 0) + 1
    text.known = known
    ahead: dict[int, int] = {}
    times = []
    for pair in pairs[known - first :]:
        again = ahead.get(pair, 0)
        ahead[pair] = again + 1
        times.append(seen.get(pair, 0) + again)
    return Places(pairs[known - first :], times)
