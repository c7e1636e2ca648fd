"""Which seed a response is sampled with, where coupled sampling is to repeat itself and yet not for ever.

With the same seed a response repeats where the policy has not moved; a policy that trains on the same noise in every
epoch learns the noise. So each sample of a problem keeps its seed for some visits and then gets another. All of it
is a function of what it is given, so that every worker says the same and nothing has to be remembered.
"""

import math
import struct
from dataclasses import dataclass
from hashlib import blake2b

DEFAULT_REFRESH = 0.5
SCALE = 2.0**64


@dataclass(frozen=True)
class SeedPolicy:
    """How long seeds are kept.

    Attributes:
        refresh: share of the seeds that is renewed at each visit of a problem, in [0, 1]. 1: every response is
            independent of all before; 0: the same noise for ever.
        max_age: visits after which a seed is renewed at the latest; None: no limit.
        every: policy versions from one visit of a problem to the next: 1 where versions are epochs, else the training
            steps of an epoch.

    Raises:
        ValueError: one of them is out of its range; the message names it.
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
        """The seed of a sample in an epoch.

        Args:
            sample: what tells the sample from all others: namespace, problem, and its number among its siblings.
            epoch: the version of the policy, at least 0.

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
