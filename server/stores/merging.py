"""Which responses a store lacks, so that what is brought back is not stored twice."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from histospec.server.stores.interface import Record

K = TypeVar("K", bound=Hashable)


def mask(generated: bytes) -> bytes:
    """The mask of a response, empty where it says that everything was generated."""
    return generated if 0 in generated else b""


def lacking(records: Iterable[Record], held: Sequence[Record]) -> list[Record]:
    """Those that are not held. A response that was sampled twice may be held once."""
    return without(records, Counter(map(_compared, held)), _compared)


def without(records: Iterable[Record], held: "Counter[K]", key: Callable[[Record], K]) -> list[Record]:
    """The records that `held` does not count, by their keys; takes the others off `held`."""
    found = []
    for record in records:
        same = key(record)
        if held[same]:
            held[same] -= 1
        else:
            found.append(record)
    return found


def _compared(record: Record) -> Record:
    """What is the same in every copy. A reward may have travelled as float32."""
    with np.errstate(over="ignore"):
        reward = None if record.reward is None else float(np.float32(record.reward))
    return record._replace(generated=mask(record.generated), reward=reward)
