"""Measures how much two responses have in common."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile


def rouge_1(new: Sequence[int], old: Sequence[int]) -> float:
    """Returns the F1 score of the shared tokens, in any order (ROUGE-1; C.-Y. Lin, 2004). 0 if both are empty."""
    shared = sum((Counter(new) & Counter(old)).values())
    return 2 * shared / (len(new) + len(old)) if new or old else 0.0


def common_prefix(new: Sequence[int], old: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(new, old, strict=False)))
