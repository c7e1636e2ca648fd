"""Finds the responses that a store lacks, so that an import stores none twice."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from histospec.server.stores.interface import Record

K = TypeVar("K", bound=Hashable)


def mask(generated: bytes) -> bytes:
    """Returns the mask of a response; empty if all tokens were generated."""
    return generated if 0 in generated else b""


def lacking(records: Iterable[Record], held: Sequence[Record]) -> list[Record]:
    """Returns the records that are not held. A held record matches one record: a response can occur twice."""
    return without(records, Counter(map(_compared, held)), _compared)


def without(records: Iterable[Record], held: "Counter[K]", key: Callable[[Record], K]) -> list[Record]:
    """Returns the records whose keys `held` does not count; removes the others from `held`."""
    found = []
    for record in records:
        same = key(record)
        if held[same]:
            held[same] -= 1
        else:
            found.append(record)
    return found


def _compared(record: Record) -> Record:
    """Returns the parts of a record that are equal in every copy.

    A reward may have travelled as float32, and a copy that passed through an older server has lost its alternatives.
    """
    with np.errstate(over="ignore"):
        reward = None if record.reward is None else float(np.float32(record.reward))
    return record._replace(generated=mask(record.generated), reward=reward, alternatives=b"")
