"""Random arguments: the client raises ValueError or TypeError with the argument's name, and goes on working."""

import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from histospec.client import Breaker, ConfigurationError, DraftClient, Limits, Response, Timeouts, Tls, UnknownSession
from histospec.client.config import configure

NOWHERE = "127.0.0.1:9"
EXAMPLES = settings(max_examples=150, suppress_health_check=list(HealthCheck))


class Odd:
    """An object of a type that no argument accepts."""


NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.booleans(),
    st.sampled_from([10**400, Fraction(1, 3), Decimal("0.5")]),
)
SCALARS = st.one_of(
    NUMBERS, st.none(), st.text(max_size=5), st.characters(codec=None), st.binary(max_size=5), st.complex_numbers()
)
ARRAYS = st.one_of(
    st.lists(st.integers(-2, 2), max_size=4).map(np.array),
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), max_size=3).map(np.array),
    st.floats().map(np.array),
    st.integers(0, 9).map(np.uint16),
    st.floats(width=32).map(np.float32),
    st.sampled_from(
        [np.datetime64("2026-01-01"), np.array("a"), np.array([None]), np.array([np.nan]), np.zeros((1, 1, 1))]
    ),
)
ATOMS = st.one_of(SCALARS, ARRAYS, st.just(Odd()), st.just(Odd), st.builds(Response, SCALARS))
ANYTHING = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.integers(0, 3), inner, max_size=2),
        st.builds(Response, inner, inner, inner, inner, inner, inner),
        st.builds(iter, st.lists(inner, max_size=2)),
    ),
    max_leaves=6,
)

OPEN = {"prompts": [[1], [2]], "problems": ["a", None], "generated": [[], [3]], "seeds": [None, 4]}
STEP = {"sessions": [1, 2], "new_tokens": [[1], [2]], "max_tokens": 4, "verify_cost": 0.1}
FINISH = {"sessions": [1, 2], "commit": False, "epochs": 1, "rewards": None, "logprobs": None, "changes": 0}
INGEST = {"prompt": [1], "responses": [Response([2])], "epoch": 1, "problem": "a", "seeds": [5]}
MANY = {"prompts": [[1]], "responses": [[Response([2])]], "epoch": 1, "problems": ["a"], "seeds": [[5]]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("open", OPEN),
    ("step", STEP),
    ("finish", FINISH),
    ("ingest", INGEST),
    ("ingest_many", MANY),
    ("history", {"prompt": [1], "problem": "a", "limit": 3}),
    ("histories", {"prompts": [[1]], "problems": ["a"], "limit": 3}),
    ("predict_length", {"prompt": [1], "problem": "a", "generated": 3, "quantiles": [0.5]}),
    ("predict_lengths", {"prompts": [[1]], "problems": ["a"], "generated": [3], "quantiles": [0.5]}),
    ("rewind", {"epoch": 1}),
    ("receive", {"pending": None}),
]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftClient]:
    """A client whose calls end before the network."""

    async def answered(self: Any, call: Any) -> Any:
        size = len(call.request.SerializeToString())
        return [size] if call.method == "PredictLengths" else size

    monkeypatch.setattr("histospec.client.transport.blocking.BlockingConnections.one", answered)
    monkeypatch.setattr("histospec.client.sync.DraftClient.flush", lambda self, timeout=None: None)
    monkeypatch.setattr("histospec.client.transport.stream.Streams.kick", lambda self, shards: written(self._core))
    with DraftClient(NOWHERE, "run", timeouts=Timeouts(step=1e-9, shutdown=0.01)) as client:
        yield client


def written(core: Any) -> None:
    """Serialises all waiting messages."""
    for shard in core.shards:
        while shard.stream and shard.stream.outbox:
            shard.stream.outbox.popleft().SerializeToString()


@pytest.mark.parametrize(("method", "name"), [(m, n) for m, arguments in CALLS for n in arguments])
@EXAMPLES
@given(value=ANYTHING)
@example(value=Odd())
@example(value="\ud800")
@example(value=10**400)
@example(value=["\ud800"])
@example(value=np.array(7))
def test_any_value_of_an_argument(client: DraftClient, method: str, name: str, value: Any) -> None:
    arguments = dict(CALLS)[method]
    open_ones = client.open([[1], [2]], ["a", None], seeds=[3, None])
    if "sessions" in arguments:
        arguments = arguments | {"sessions": open_ones}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        error = raised(lambda: getattr(client, method)(**arguments | {name: value}))
        if error is not None:
            assert isinstance(error, ValueError | TypeError | UnknownSession)
            assert name in str(error), f"{type(error).__name__}: {error}"  # also "problems: 2 values for 1 prompts"
            assert len(str(error)) < 500
        still = [number for number in open_ones if raised(lambda: client.step([number], [[]])) is None]  # noqa: B023
        client.step(still, [[1]] * len(still))  # accepted arguments can be serialised
        client.finish(still)
        client.step([], [])


@EXAMPLES
@given(
    name=st.sampled_from(["endpoint", "namespace", "token", "tls", "deadline", "timeouts", "breaker", "limits"]),
    value=ANYTHING,
)
def test_any_value_in_the_configuration(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"endpoint": NOWHERE, "namespace": "run"}
    error = raised(lambda: configure(**arguments | {name: value}))
    assert error is None or (isinstance(error, ConfigurationError) and str(error).startswith(name)), error


@EXAMPLES
@given(kind=st.sampled_from([Timeouts, Breaker, Limits, Tls]), data=st.data())
def test_any_value_of_a_field(kind: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(kind.__dataclass_fields__)))
    value = data.draw(ANYTHING)
    error = raised(lambda: kind(**{name: value}))
    assert error is None or isinstance(error, ConfigurationError), error
    assert error is None or name in str(error) or (kind is Tls and isinstance(value, str)), error  # one of a pair


def raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
