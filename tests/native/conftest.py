"""An engine with one response and one session, for the tests of the engine's contract."""

import numpy as np
import pytest

from histospec.native import Engine

PROMPT = [11, 12, 13, 14]
RESPONSE = [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
BIG = 2**31 - 1


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.fixture
def engine() -> Engine:
    """With one response in `run`, and one session behind it that has generated its first three tokens."""
    engine = Engine(memory_bytes=1 << 28)
    engine.ingest("run", PROMPT, [RESPONSE], epoch=2)
    session = engine.open("run", PROMPT)
    assert session == 1
    engine.step(i64(session), i32(*RESPONSE[:3]), i64(0, 3))
    return engine


SESSION = 1
