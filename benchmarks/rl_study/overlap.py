"""How much of a response the one before it at its place had already."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile


def rouge_1(new: Sequence[int], old: Sequence[int]) -> float:
    """F1 of the tokens that both hold, in any order (ROUGE-1; C.-Y. Lin, 2004). 0 where both are empty."""
    shared = sum((Counter(new) & Counter(old)).values())
    return 2 * shared / (len(new) + len(old)) if new or old else 0.0


def common_prefix(new: Sequence[int], old: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(new, old, strict=False)))
