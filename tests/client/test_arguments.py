"""Checks of arguments: the error names the argument, and nothing was changed or sent."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from histospec.client import (
    AsyncDraftClient,
    ConfigurationError,
    DraftClient,
    HistoSpecError,
    Response,
    Timeouts,
    UnknownSession,
)
from histospec.client.arguments import batch_bytes, token_bytes

NOWHERE = "127.0.0.1:9"

BAD_TOKENS = [
    ([1, -1], r"token -1 is outside \[0, 2147483647\]"),
    ([1 << 31], r"token 2147483648 is outside"),
    ([1 << 70], r"token 1180591620717411303424 is outside"),
    ([1.5], "must be integers; item 0 is 1.5"),
    ([1, True, 2.0], "must be integers; item 1 is True"),
    ([1, 2.0, 1 << 70], "must be integers; item 1 is 2.0"),
    (["a"], "must be integers; item 0 is 'a'"),
    ("abc", "must be token ids, is str"),
    (b"abc", "must be token ids, is bytes"),
    ([[1, 2], [3, 4]], r"must be a flat list of token ids; got a list of lists, of shape \(2, 2\)"),
    ([[1], [2, 3]], "must be a flat list of token ids; got a list of lists"),
    (np.array([1.0]), "must be integers; item 0 is 1.0"),
    (np.array([[1]]), "must be a flat list of token ids; got a list of lists"),
    (7, "must be a flat list of token ids, is 7"),
    (None, "must be a flat list of token ids, is None"),
    ({1, 2}, "must be a flat list of token ids, is set"),
]

BAD_SEEDS = [
    (2**63, r"9223372036854775808 is outside \[-2\^63, 2\^63\)"),
    (-(2**63) - 1, r"-9223372036854775809 is outside"),
    (1.5, "must be an integer, is 1.5"),
    (True, "must be an integer, is True"),
]


@pytest.fixture
def client() -> Iterator[DraftClient]:
    with DraftClient(NOWHERE, "run", timeouts=Timeouts(call=1, ingest=1)) as client:
        yield client


@pytest.mark.parametrize(("value", "message"), BAD_TOKENS)
def test_bad_tokens_are_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_bytes("prompt", value)
    with pytest.raises(ValueError, match=rf"new_tokens\[1\]: .*{message}"):
        batch_bytes("new_tokens", [[1, 2], value])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64, ">i4"])
def test_every_integer_type_travels_alike(dtype: Any) -> None:
    expected = np.array([5, 6, 7], "<i4").tobytes()
    assert token_bytes("x", np.array([5, 6, 7], dtype)) == expected
    assert token_bytes("x", [5, 6, 7]) == token_bytes("x", (5, 6, 7)) == token_bytes("x", range(5, 8)) == expected
    assert batch_bytes("x", [np.array([5], dtype), [], [6, 7]]) == (expected, [1, 0, 2])
    assert batch_bytes("x", [[5], (6,), range(7, 8)]) == (expected, [1, 1, 1])
    assert batch_bytes("x", [[], []]) == (b"", [0, 0])


def test_bad_prompt_opens_nothing(client: DraftClient) -> None:
    two = [[1], [2]]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompts": [[1], [2], [3], [4, -1]]}, r"prompts\[3\]: token -1 is outside \[0, 2147483647\]"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: must not be empty"),
        ({"prompts": two, "problems": ["a"]}, "problems: 1 values for 2 prompts"),
        ({"prompts": [[1]], "problems": ["a" * 1025]}, r"problems\[0\]: 1025 characters"),
        ({"prompts": two, "generated": [[3]]}, "generated: 1 values for 2 prompts"),
        ({"prompts": two, "generated": [[3], [-3]]}, r"generated\[1\]: token -3 is outside"),
        ({"prompts": two, "seeds": [3]}, "seeds: 1 values for 2 prompts"),
        *(({"prompts": two, "seeds": [None, seed]}, rf"seeds\[1\]: {message}") for seed, message in BAD_SEEDS),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            client.open(**arguments)
    assert client.open([[1]] * 2, seeds=np.array([-(2**63), 2**63 - 1])) == [1, 2]  # type: ignore[arg-type]


def test_bad_step_changes_nothing(client: DraftClient) -> None:
    a, b = client.open([[1], [2]])
    for arguments, message in [
        (([a, b], [[1]]), "new_tokens: 1 values for 2 sessions"),
        (([a, b], [[1], [-5]]), r"new_tokens\[1\]: token -5"),
        (([a, a], [[1], [2]]), "sessions: a session appears twice"),
        (([a], [[1]], 257), "max_tokens: 257"),
        (([a], [[1]], -1), "max_tokens: -1"),
        (([a], [[1]], 16, math.nan), "verify_cost: nan"),
        (([a], [[1]], 16, -0.1), "verify_cost: -0.1"),
    ]:
        with pytest.raises(ValueError, match=message):
            client.step(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UnknownSession, match=r"^sessions\[1\]: 77 is not an open session of this client$"):
        client.step([a, 77], [[1], [2]])
    # If one of the calls had appended a token, one logprob would not fit.
    client.step([a], [[1]])
    client.close([a], logprobs=[[-0.5]])


def test_a_bad_report_changes_nothing(client: DraftClient) -> None:
    a, b = client.open([[1], [2]])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"verified": [1]}, "verified: 1 values for 2 sessions"),
        ({"verified": 1}, r"verified: must be a list of counts, one for each session, is 1"),
        ({"verified": [1, -1]}, r"verified\[1\]: -1 is outside \[0, 1024\]"),
        ({"verified": [1025, 0]}, r"verified\[0\]: 1025 is outside"),
        ({"verified": [0, 0.5]}, r"verified\[1\]: must be an integer, is 0.5"),
        ({"verified": [0, None]}, r"verified\[1\]: must be an integer, is None"),
        ({"verified": [0, 1 << 80]}, r"verified\[1\]: .* is outside"),
        ({"model_drafted": [1, 1], "model_accepted": [0, 0]}, "verified: must be given with model_drafted"),
        ({"verified": [0, 0], "model_drafted": [1, 1]}, "model_accepted: must be given"),
        ({"verified": [0, 0], "model_accepted": [1, 1]}, "model_drafted: must be given"),
        (
            {"verified": [0, 0], "model_drafted": [1, 1], "model_accepted": [1, 2]},
            r"model_accepted\[1\]: 2 are more than the 1 drafted",
        ),
    ]
    for report, message in wrong:
        with pytest.raises(ValueError, match=message):
            client.step([a, b], [[1], [2]], **report)
    for counts in ([0, 3], (0, 3), np.array([0, 3]), np.array([0, 3], np.uint8)):
        client.step([a, b], [[], []], verified=counts, model_drafted=counts, model_accepted=counts)  # type: ignore[arg-type]
    client.step([], [], verified=[], model_drafted=[], model_accepted=[])
    client.step([a], [[1]])
    client.close([a], logprobs=[[-0.5]])


def test_bad_close_closes_nothing(client: DraftClient) -> None:
    a, b = client.open([[1], [2]])
    client.step([a, b], [[1, 2], [3]])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"epochs": -1}, r"epochs: -1 is outside"),
        ({"epochs": 2**52 + 1}, "epochs: 4503599627370497 is more than the limit of 4503599627370496"),
        ({"epochs": [1]}, "epochs: 1 values for 2 sessions"),
        ({"epochs": [1, 1.5]}, r"epochs\[1\]: must be an integer"),
        ({"changes": -1}, r"changes: -1 is outside"),
        ({"changes": [1, 1 << 32]}, r"changes\[1\]: 4294967296 is outside"),
        ({"changes": [1, 1.5]}, r"changes\[1\]: must be an integer"),
        ({"rewards": [1.0, math.inf]}, r"rewards\[1\]: must be a finite number"),
        ({"logprobs": [[-1.0, -1.0], [-1.0, -2.0]]}, r"logprobs\[1\]: must have one value for each of the 1 tokens"),
        ({"logprobs": [[-1.0, math.nan], None]}, r"logprobs\[0\]: value 1 is not a number"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            client.close([a, b], **arguments)
    client.close([a, b], epochs=[1, None], rewards=[1, None], logprobs=[[-1.0, -2.0], None], changes=2)
    with pytest.raises(UnknownSession):
        client.close([a])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (Response([]), r"responses\[1\]\.tokens: must not be empty"),
        (Response([-1]), r"responses\[1\]\.tokens: token -1"),
        (Response([1], logprobs=[1.0, 2.0]), r"responses\[1\]\.logprobs: must have one value for each of the 1 tokens"),
        (Response([1], reward=math.nan), r"responses\[1\]\.reward: must be a finite number"),
        (Response([1], generated=[2]), r"responses\[1\]\.generated: every value must be True or False"),  # type: ignore[list-item]
        (Response([1], seed=2**63), r"responses\[1\]\.seed: 9223372036854775808 is outside"),
        ([1, 2], r"responses\[1\]: must be a Response, is list"),
    ],
)
def test_bad_response_is_not_sent(client: DraftClient, response: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        client.ingest([1], [Response([1]), response])
    assert not isinstance(caught.value, HistoSpecError)  # the client did not call the server


def test_bad_seeds_are_not_sent(client: DraftClient) -> None:
    with pytest.raises(ValueError, match="seeds: 1 values for 2 responses"):
        client.ingest([1], [Response([1]), Response([2])], seeds=[1])
    with pytest.raises(ValueError, match="seeds: 1 values for 2 prompts"):
        client.ingest_many([[1], [2]], [[Response([1])], [Response([2])]], seeds=[[1]])
    with pytest.raises(ValueError, match=r"responses\[1\]: must be a Response"):
        client.ingest([1], [Response([1]), [2]], seeds=[1, 2])  # type: ignore[list-item]
    for seed, message in BAD_SEEDS:
        with pytest.raises(ValueError, match=rf"seeds\[1\]: {message}") as caught:
            client.ingest([1], [Response([1]), Response([2])], seeds=[None, seed])  # type: ignore[list-item]
        assert not isinstance(caught.value, HistoSpecError)


def test_configuration_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_ENDPOINT", "a:1, b:2")
    monkeypatch.setenv("HISTOSPEC_NAMESPACE", "env")
    monkeypatch.setenv("HISTOSPEC_DEADLINE", "0.5")
    monkeypatch.setenv("HISTOSPEC_TOKEN", "secret")
    config = DraftClient().config
    assert [(e.name, e.address) for e in config.endpoints] == [("a:1", "a:1"), ("b:2", "b:2")]
    assert (config.namespace, config.timeouts.step, config.token) == ("env", 0.5, "secret")
    assert "secret" not in repr(config)
    monkeypatch.setenv("HISTOSPEC_DEADLINE", "2000")
    with pytest.raises(ConfigurationError, match="HISTOSPEC_DEADLINE: 2000 seconds are more than the limit of 60"):
        DraftClient()
    config = AsyncDraftClient("x=[::1]:3,y=h:4", "given", deadline=0.1, token="t").config
    assert [(e.name, e.address) for e in config.endpoints] == [("x", "[::1]:3"), ("y", "h:4")]
    assert (config.namespace, config.timeouts.step, config.token) == ("given", 0.1, "t")


def test_when_a_shard_leaves_is_said_by_the_environment_or_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(timeouts: Timeouts | None = None) -> float:
        return DraftClient("discover://a:1", "run", deadline=0.5, timeouts=timeouts).config.timeouts.leave

    assert leave() == 30
    monkeypatch.setenv("HISTOSPEC_LEAVE_SECONDS", "")
    assert leave() == 30
    monkeypatch.setenv("HISTOSPEC_LEAVE_SECONDS", "600")
    assert leave() == 600
    assert leave(Timeouts(leave=5)) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "HISTOSPEC_ENDPOINT"),
        ({"endpoint": "h:1"}, "HISTOSPEC_NAMESPACE"),
        (
            {"endpoint": "h", "namespace": "n"},
            "'h' is not of the form host:port or name=host:port; add the port, usually",
        ),
        ({"endpoint": "[::1]", "namespace": "n"}, "; add the port, usually :6378"),
        ({"endpoint": "::1:6378", "namespace": "n"}, r"; put an IPv6 address in brackets, such as \[::1\]:6378"),
        ({"endpoint": "http://h:6378", "namespace": "n"}, "; give no URL, but the host and the port of gRPC"),
        ({"endpoint": "http://h:1", "namespace": "n"}, "not of the form"),
        ({"endpoint": ",", "namespace": "n"}, "names no address"),
        ({"endpoint": "h:1,h:1", "namespace": "n"}, "named twice"),
        ({"endpoint": "h:1", "namespace": "n" * 129}, "129 characters"),
        ({"endpoint": "h:1", "namespace": "n", "deadline": 0}, "deadline: must be a number of seconds above 0"),
        (
            {"endpoint": "h:1", "namespace": "n", "deadline": 60.5},
            "deadline: 60.5 seconds are more than the limit of 60",
        ),
        ({"endpoint": "a=h:1,b=h:0", "namespace": "n"}, r"the port of 'b=h:0' is outside \[1, 65535\]"),
        ({"endpoint": "discover://h:65536", "namespace": "n"}, r"the port of 'h:65536' is outside \[1, 65535\]"),
    ],
)
def test_configuration_errors_say_what_to_set(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("HISTOSPEC_ENDPOINT", raising=False)
    monkeypatch.delenv("HISTOSPEC_NAMESPACE", raising=False)
    with pytest.raises(ConfigurationError, match=message):
        DraftClient(**arguments)
