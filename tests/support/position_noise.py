"""The noise of vLLM's model runner V2 in numpy: a function of seed, position of the newest token, and token.

Its bits are MurmurHash3 of these 16 bytes. The logarithms are exact; those of vLLM's kernel differ in the last digits.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint32]

KNOWN = [
    (0, 0, (0, 1, 255, 256), (0.352945, 6.058697, 0.001109, 0.867154)),
    (1, 5, (3, 511, 512, 1023), (-1.154724, 0.079496, -0.571010, 0.494154)),
    (-1, 2**31 - 1, (1024, 1280, 151935, 7), (0.583205, 0.597412, -0.252356, 0.857050)),
    ((1 << 62) + 12345, 1000, (767, 768, 2047, 50000), (0.202814, 2.376513, 1.662062, 0.546896)),
    (-(2**63), 40960, (1, 2, 3, 4), (1.992754, -0.208652, 0.283350, 2.528480)),
]
"""Seed, position, tokens and their noise: answers of vLLM's kernel, the same with 0.32 and 0.33. native/tests/
noise_test.cc has the same table."""


def position_noise(seed: ArrayLike, position: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
    """Returns standard Gumbel noise of each token; the arguments are broadcast."""
    seeds = np.asarray(seed, np.int64).astype(np.uint64)
    h = np.zeros(1, np.uint32)
    with np.errstate(over="ignore"):
        for key in (seeds, seeds >> np.uint64(32), np.asarray(position), np.asarray(tokens)):
            h = _mixed(h, key.astype(np.uint32))
        h = h ^ np.uint32(16)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        h = h ^ h >> np.uint32(16)
    u = (h.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log1p(-u))
    return noise


def _mixed(h: Words, key: Words) -> Words:
    h = h ^ _rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(words: Words, by: int) -> Words:
    return words << np.uint32(by) | words >> np.uint32(32 - by)
