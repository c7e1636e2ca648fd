"""The place of a token, which selects its noise: the two tokens before it, and how often this pair occurred before.

Noise must be fresh for every token of a response. If repeated text drew the same noise again, a loop would never end.
The position would also be fresh, but after one inserted or missing word all later positions differ. With pairs, the
noise is the same again behind the same words (`benchmarks/vllm/noise_keys.py` compares both).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

WORD = 0xFFFFFFFF


class Places(NamedTuple):
    """The places of the tokens that a request may get in this step: one per drafted token, and one after the draft.

    Attributes:
        pairs: the two tokens before the place, 32 bits each, in one int64; a missing token is -1.
        times: how often this pair occurred before in the same text.
    """

    pairs: list[int]
    times: list[int]


@dataclass
class _Text:
    known: int = 0
    """How many of its tokens are counted."""
    seen: dict[int, int] = field(default_factory=dict)
    """How many of these tokens follow each pair."""


class Texts:
    """The texts of the running requests."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def places(self, requests: Iterable[tuple[str, Any, int, int]]) -> list[Places]:
        """Returns the places of each request.

        It forgets requests that are missing. One that comes back is counted again, with the same result.

        Args:
            requests: of each request its id, its tokens (int32), how many of them are known, and how many drafted
                tokens follow.
        """
        before, self._texts = self._texts, {}
        found = []
        for request_id, tokens, known, drafted in requests:
            text = before.get(request_id, _Text())
            if text.known > known:  # vLLM discarded tokens
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
