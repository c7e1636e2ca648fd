"""Decides which shard owns a problem: rendezvous hashing (highest random weight).

Every client computes a weight for every shard and takes the highest, so all agree without communication. When a shard
comes or goes, only the problems that it gains or loses move (1/N of them).

The hash must be the same on every machine, in every version and in every language, so it is specified here::

    problem digest = BLAKE2b-128(namespace utf-8, 0x00, "i", problem id utf-8)       with an explicit problem id
                     BLAKE2b-128(namespace utf-8, 0x00, "p", prompt int32 little-endian)              without
    weight         = BLAKE2b-64(problem digest, shard name utf-8) as a little-endian integer

Among equal weights, the name that sorts last wins.
"""

from collections.abc import Sequence
from hashlib import blake2b


def problem_digest(namespace: str, prompt: bytes, problem: str = "") -> bytes:
    """Returns the 16 bytes that identify a problem; `prompt` is its little-endian int32 tokens."""
    what = b"\0i" + problem.encode() if problem else b"\0p" + prompt
    return blake2b(namespace.encode() + what, digest_size=16).digest()


def weight(digest: bytes, shard: str) -> int:
    """Returns the weight of a problem for the shard with this name."""
    return int.from_bytes(blake2b(digest + shard.encode(), digest_size=8).digest(), "little")


def place(digest: bytes, shards: Sequence[str]) -> int:
    """Returns the index of the shard that owns the problem."""
    if len(shards) == 1:
        return 0
    return max(range(len(shards)), key=lambda i: (weight(digest, shards[i]), shards[i]))
