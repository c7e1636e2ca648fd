"""Invalid arguments: the error names the argument, and nothing has changed. Takes about 2 s."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from histospec.native import Engine
from tests.native.conftest import BIG, PROMPT, RESPONSE, SESSION, i32, i64


def seen(engine: Engine) -> object:
    """Returns everything that the engine reports."""
    history = [[(t.tolist(), e) for t, e in engine.history(name, PROMPT)] for name in ("run", "new")]
    return engine.stats(), engine.memory_bytes(), history, engine.lengths(i64(0, 1, 2, 3)).tolist()


ONE = (i64(SESSION), i32(24), i64(0, 1))
Call = Callable[[Any], object]
REFUSED: dict[str, tuple[Call, str]] = {
    # dtypes
    "int64 prompt": (lambda e: e.open("new", i64(1, 2)), "prompt: has dtype int64, must be int32"),
    "int64 response": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE, i64(1)]),
        "responses[1]: has dtype int64, must be int32",
    ),
    "float response": (
        lambda e: e.ingest("new", PROMPT, [np.ones(3)]),
        "responses[0]: has dtype float64, must be int32",
    ),
    "other byte order": (lambda e: e.open("new", np.array([1], ">i4")), "prompt: has dtype >i4, must be int32"),
    "uint32 generated": (
        lambda e: e.open("new", PROMPT, generated=np.ones(2, np.uint32)),
        "generated: has dtype uint32, must be int32",
    ),
    "int32 sessions": (lambda e: e.step(i32(SESSION), *ONE[1:]), "sessions: has dtype int32, must be int64"),
    "list of sessions": (lambda e: e.step([SESSION], *ONE[1:]), "sessions: must be a numpy array of int64, is a list"),
    "int64 new_tokens": (lambda e: e.step(ONE[0], i64(24), ONE[2]), "new_tokens: has dtype int64, must be int32"),
    "int32 new_offsets": (lambda e: e.step(*ONE[:2], i32(0, 1)), "new_offsets: has dtype int32, must be int64"),
    "int32 positions": (lambda e: e.step(*ONE, positions=i32(3)), "positions: has dtype int32, must be int64"),
    "int32 lengths": (lambda e: e.lengths(i32(1)), "sessions: has dtype int32, must be int64"),
    "bytes": (lambda e: e.open("new", b"1234"), "prompt: must be a numpy array of int32, is a bytes"),
    "floats in a list": (lambda e: e.open("new", [1, 2.0]), "prompt: element 1 is not an integer"),
    "bool in a list": (lambda e: e.open("new", [1, True]), "prompt: element 1 is not an integer"),
    "a response for responses": (
        lambda e: e.ingest("new", PROMPT, i32(1, 2)),
        "responses[0]: must be a numpy array of int32",
    ),
    "int32 mask": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE], generated=[np.ones(10, np.int32)]),
        "generated[0]: has dtype int32, must be uint8",
    ),
    # shapes
    "two dimensions": (lambda e: e.open("new", i32(1, 2)[None]), "prompt: has 2 dimensions, must have 1"),
    "no dimension": (
        lambda e: e.ingest("new", PROMPT, [np.array(3, np.int32)]),
        "responses[0]: has 0 dimensions, must have 1",
    ),
    "sessions in two dimensions": (
        lambda e: e.step(i64(SESSION)[None], *ONE[1:]),
        "sessions: has 2 dimensions, must have 1",
    ),
    "short mask": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE, RESPONSE], generated=[None, np.ones(9, bool)]),
        "responses[1]: its mask has 9 entries for 10 tokens",
    ),
    "too few masks": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE, RESPONSE], generated=[None]),
        "generated: has 1 entries, must have 2",
    ),
    "too few seeds": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE, RESPONSE], seeds=[7]),
        "seeds: has 1 entries, must have 2",
    ),
    "too many rewards": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE], rewards=[1.0, 2.0]),
        "rewards: has 2 entries, must have 1",
    ),
    "empty prompt": (lambda e: e.open("new", []), "prompt: must not be empty"),
    "empty prompt to ingest": (lambda e: e.ingest("new", i32(), [RESPONSE]), "prompt: must not be empty"),
    "empty namespace": (lambda e: e.open("", PROMPT), "namespace: must not be empty"),
    "empty problem": (lambda e: e.open("new", PROMPT, problem=""), "problem: must not be empty"),
    # token range
    "negative in a list": (lambda e: e.open("new", [1, -1]), "prompt: element 1 is outside [0, 2147"),
    "too large in a list": (
        lambda e: e.ingest("new", PROMPT, [[1], [BIG + 1]]),
        "responses[1]: element 0 is outside [0, 2147483647]",
    ),
    "far too large": (lambda e: e.open("new", [10**30]), "prompt: element 0 is outside"),
    "negative in an array": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE, i32(1, 2, -7)], epoch=9),
        "responses[1]: token -7 at 2 is outside [0, 2147483647]",
    ),
    "seed of more than 64 bits": (lambda e: e.open("new", PROMPT, seed=2**63), "seed: is outside [-2**63, 2**63 - 1]"),
    "float for a seed": (lambda e: e.open("new", PROMPT, seed=1.0), "seed: must be an integer or None"),
    "bool for a seed": (
        lambda e: e.ingest("new", PROMPT, [RESPONSE, RESPONSE], seeds=[-(2**63), True]),
        "seeds[1]: must be an integer or None, is a bool",
    ),
    "far too small a seed": (lambda e: e.ingest("new", PROMPT, [RESPONSE], seeds=[-(10**30)]), "seeds[0]: is outside"),
    "negative prompt": (lambda e: e.open("new", i32(-1)), "prompt: token -1 at 0 is outside"),
    "negative generated": (lambda e: e.open("new", PROMPT, generated=i32(-1)), "generated: token -1 at 0 is outside"),
    "negative new token": (lambda e: e.step(ONE[0], i32(24, -2), i64(0, 2)), "new_tokens: token -2 at 1 is outside"),
    # sessions
    "the same session twice": (
        lambda e: e.step(i64(SESSION, SESSION), i32(24, 24), i64(0, 1, 2)),
        "sessions: 1 appears twice",
    ),
    # offsets, positions, limits
    "too few offsets": (lambda e: e.step(*ONE[:2], i64(0)), "new_offsets: has 1 entries, must have 2"),
    "no offsets": (lambda e: e.step(i64(), i32(), i64()), "new_offsets: has 0 entries, must have 1"),
    "offsets not from zero": (
        lambda e: e.step(*ONE[:2], i64(1, 1)),
        "new_offsets: must ascend from 0 to the number of new_tokens, 1",
    ),
    "offsets beyond the tokens": (lambda e: e.step(*ONE[:2], i64(0, 2)), "new_offsets: must ascend"),
    "offsets short of the tokens": (lambda e: e.step(*ONE[:2], i64(0, 0)), "new_offsets: must ascend"),
    "offsets that fall": (lambda e: e.step(i64(SESSION, 2), i32(24), i64(0, 2**62, 1)), "new_offsets: must ascend"),
    "position beyond": (lambda e: e.step(*ONE, positions=i64(4)), "positions[0]: is 4, but the session has 3"),
    "negative position": (lambda e: e.step(*ONE, positions=i64(-1)), "positions[0]: is -1"),
    "too many positions": (lambda e: e.step(*ONE, positions=i64(3, 3)), "positions: has 2 entries"),
    "negative max_tokens": (lambda e: e.step(*ONE, max_tokens=-1), "max_tokens: is -1, must lie in [0, 1024]"),
    "huge max_tokens": (lambda e: e.step(*ONE, max_tokens=1025), "max_tokens: is 1025, must lie in [0, 1024]"),
    "negative cost": (lambda e: e.step(*ONE, verify_cost=-0.1), "verify_cost: must be a number"),
    "no cost": (lambda e: e.step(*ONE, verify_cost=float("nan")), "verify_cost: must be a number"),
    "quantile": (lambda e: e.predict_length("run", PROMPT, 0, [0.5, 1.1]), "quantiles: each must lie in [0, 1]"),
}
UNKNOWN: dict[str, tuple[Call, str]] = {
    "unknown session": (lambda e: e.step(i64(SESSION, 77), i32(24, 24), i64(0, 1, 2)), "session 77 is not open"),
    "closing an unknown session": (lambda e: e.close(77), "session 77 is not open"),
    "session zero": (lambda e: e.generated(0), "session 0 is not open"),
}


@pytest.mark.parametrize("call", [*REFUSED, *UNKNOWN])
def test_refused_and_nothing_changed(engine: Engine, call: str) -> None:
    wrong, text = REFUSED.get(call) or UNKNOWN[call]
    before = seen(engine)
    with pytest.raises(ValueError if call in REFUSED else KeyError, match=re.escape(text)):
        wrong(engine)
    assert seen(engine) == before
    engine.check_integrity()
    # The session is not affected and drafts as before.
    assert engine.step(i64(SESSION), i32(), i64(0, 0))[0].tolist()[:4] == RESPONSE[3:7]


def test_an_empty_batch_and_empty_responses_are_fine(engine: Engine) -> None:
    before = seen(engine)
    tokens, offsets, probs = engine.step(i64(), i32(), i64(0))
    assert (tokens.shape, offsets.tolist(), probs.shape) == ((0,), [0], (0,))
    assert engine.lengths(i64()).shape == (0,)
    engine.ingest("run", PROMPT, [])
    engine.ingest("run", PROMPT, [[], i32()], epoch=9)
    assert seen(engine) == before
