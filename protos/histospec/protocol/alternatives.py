"""The alternatives of a response: at some of its places, other tokens that the policy found probable.

A place has at most MOST alternatives, and most places have none: nothing else had LEAST there. Messages, stores and the
engine have the alternatives of a response of n tokens as the same bytes:

    counts   2 bits per token, four tokens per byte, the first in the lowest bits: how many alternatives its place has
    groups   for each place that has some: the level of the response's own token, 1 byte; then its alternatives, the
             most probable first, 4 bytes each, little-endian: token << 8 | level

A level is -16 ln p, rounded, at most 255. A response without alternatives has no bytes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST = 3
"""Alternatives at one place."""
LEAST = 0.05
"""The smallest probability of an alternative that samplers report."""
TOKENS = 1 << 24
"""The largest token of an alternative is one less."""
LEVELS_PER_NAT = 16
HIGHEST = 255
"""The level of every probability below e^-15.9."""

ABSENT = 0xFFFFFFFF
"""In an array of alternatives: none."""
_WORD = np.dtype("<u4")
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


class Place(NamedTuple):
    """The alternatives at one place of a response, for people and tests."""

    sampled: float
    """Probability of the response's own token."""
    others: list[tuple[int, float]]
    """Token and probability of each alternative, the most probable first."""


def groups_of(levels: NDArray[np.uint8], words: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], bytes]:
    """Returns the counts of n places, uint8[n], and their groups.

    Args:
        levels: uint8[n], of the tokens that were sampled.
        words: uint32[n, MOST], `token << 8 | level` of each alternative, then ABSENT.
    """
    given = words != ABSENT
    counts = given.sum(1, dtype=np.uint8)
    columns = np.empty((len(levels), 1 + 4 * MOST), np.uint8)
    columns[:, 0] = levels
    columns[:, 1:] = np.ascontiguousarray(words, _WORD).view(np.uint8)
    wanted = np.repeat(np.column_stack([counts > 0, given]), [1, *[4] * MOST], axis=1)
    return counts, columns[wanted].tobytes()


def joined(counts: NDArray[np.uint8], groups: bytes) -> bytes:
    """Returns the alternatives of a response from the counts of its tokens, uint8[n], and its groups."""
    if not groups:
        return b""
    padded = np.zeros(-(-len(counts) // 4) * 4, np.uint8)
    padded[: len(counts)] = counts
    bits: NDArray[np.uint8] = (padded.reshape(-1, 4) << _SHIFTS).sum(1, dtype=np.uint8)
    return bits.tobytes() + groups


def fault(packed: bytes, tokens: int) -> str:
    """Returns what is wrong with the alternatives of a response of so many tokens; empty if nothing is."""
    if not packed:
        return ""
    least = -(-tokens // 4)
    if len(packed) < least:
        return f"{len(packed)} bytes are fewer than the {least} of the counts of {tokens} tokens"
    counts = _counts(packed, tokens)
    if counts[tokens:].any():
        return f"a place behind the {tokens} tokens has alternatives"
    expected = least + int(_sizes(counts).sum())
    if len(packed) != expected:
        return f"{len(packed)} bytes, but its counts need {expected}"
    return ""


def pack(places: Sequence[Place | None]) -> bytes:
    """Returns the alternatives of a response from those of each of its tokens; None where there are none.

    Raises ValueError if a place has more than MOST alternatives, a token is out of range, or a probability is no number
    in (0, 1].
    """
    counts = np.zeros(len(places), np.uint8)
    groups = bytearray()
    for i, place in enumerate(places):
        if place is None or not place.others:
            continue
        if len(place.others) > MOST:
            raise ValueError(f"alternatives[{i}]: {len(place.others)} are more than the limit of {MOST}")
        counts[i] = len(place.others)
        groups.append(_level(f"alternatives[{i}]: the sampled token", place.sampled))
        for token, probability in place.others:
            if not 0 <= token < TOKENS:
                raise ValueError(f"alternatives[{i}]: token {token} is outside [0, {TOKENS})")
            groups += (int(token) << 8 | _level(f"alternatives[{i}]: token {token}", probability)).to_bytes(4, "little")
    return joined(counts, bytes(groups))


def preceded(packed: bytes, tokens: int, by: int) -> bytes:
    """Returns the alternatives of `tokens` tokens, with `by` tokens before them that have none."""
    if not packed or not by:
        return packed
    counts = _counts(packed, tokens)[:tokens]
    return joined(np.concatenate([np.zeros(by, np.uint8), counts]), packed[-(-tokens // 4) :])


def unpack(packed: bytes, tokens: int) -> list[Place | None]:
    """Returns the alternatives of each token, or None for a token without. Raises ValueError if they do not fit."""
    if wrong := fault(packed, tokens):
        raise ValueError(f"alternatives: {wrong}")
    if not packed:
        return [None] * tokens
    places: list[Place | None] = []
    at = -(-tokens // 4)
    for count in _counts(packed, tokens)[:tokens].tolist():
        if count:
            words = np.frombuffer(packed, _WORD, count, at + 1).tolist()
            places.append(Place(_probability(packed[at]), [(word >> 8, _probability(word & 255)) for word in words]))
            at += 1 + 4 * count
        else:
            places.append(None)
    return places


def _counts(packed: bytes, tokens: int) -> NDArray[np.uint8]:
    """Returns the counts, uint8; their number is the next multiple of 4."""
    bits = np.frombuffer(packed, np.uint8, -(-tokens // 4))
    counts: NDArray[np.uint8] = ((bits[:, None] >> _SHIFTS) & 3).astype(np.uint8).ravel()
    return counts


def _sizes(counts: NDArray[np.uint8]) -> NDArray[Any]:
    """Returns the bytes of the group of each place."""
    return np.where(counts, 1 + 4 * counts.astype(np.int64), 0)


def _level(name: str, probability: float) -> int:
    if not 0 < probability <= 1:  # refuses NaN, too
        raise ValueError(f"{name}: probability {probability} is outside (0, 1]")
    return min(HIGHEST, round(-LEVELS_PER_NAT * float(np.log(probability))))


def _probability(level: int) -> float:
    return float(np.exp(-level / LEVELS_PER_NAT))
