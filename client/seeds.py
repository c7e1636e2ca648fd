"""The seeds of coupled sampling: how long each sample of a problem keeps its seed.

By default each sample of a problem gets a new seed at each visit. With the same seed, a response repeats wherever the
policy has not changed, but a policy that trains on the same noise in every epoch learns the noise. With a smaller share
of renewed seeds, a sample therefore keeps its seed for some visits and then gets another. Seeds are a pure function of
the sample and the epoch, so that all workers agree without sharing any state.
"""

import math
import struct
from dataclasses import dataclass
from hashlib import blake2b

DEFAULT_REFRESH = 1.0
SCALE = 2.0**64


@dataclass(frozen=True)
class SeedPolicy:
    """How long samples keep their seeds.

    Attributes:
        refresh: share of the seeds that is renewed at each visit of a problem, in [0, 1]. 1: every response is
            independent of all before; 0: seeds are never renewed.
        max_age: visits after which a seed is renewed at the latest; None: no limit.
        every: policy versions between two visits of a problem: 1 if versions are epochs, else the training steps per
            epoch.

    Raises:
        ValueError: an attribute is out of range; the message names it.
    """

    refresh: float = DEFAULT_REFRESH
    max_age: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.refresh) and 0 <= self.refresh <= 1):
            raise ValueError(f"refresh: expected a share from 0 to 1, got {self.refresh!r}")
        if self.max_age is not None and self.max_age < 1:
            raise ValueError(f"max_age: expected at least 1 visit, got {self.max_age!r}")
        if self.every < 1:
            raise ValueError(f"every: expected at least 1 policy version, got {self.every!r}")

    def seed(self, sample: bytes, epoch: int) -> int:
        """Returns the seed of a sample in an epoch.

        Args:
            sample: identity of the sample: namespace, problem, and its number among its siblings.
            epoch: version of the policy, at least 0.

        Returns:
            An integer in [0, 2^63).
        """
        renews = self.refresh > 0 or self.max_age is not None
        visit = epoch // self.every if renews else 0
        while visit > 0 and not self._renewed(sample, visit):
            visit -= 1
        return _hash(sample, visit, b"seed") >> 1

    def _renewed(self, sample: bytes, visit: int) -> bool:
        if self.max_age is not None and (visit + _hash(sample, 0, b"phase")) % self.max_age == 0:
            return True
        return _hash(sample, visit, b"renew") / SCALE < self.refresh


def _hash(sample: bytes, visit: int, purpose: bytes) -> int:
    digest = blake2b(sample, digest_size=8, salt=struct.pack("<q", visit), person=purpose)
    return int.from_bytes(digest.digest(), "little")
