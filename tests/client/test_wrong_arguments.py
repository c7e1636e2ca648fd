"""Arguments of the wrong shape or type: the error names the argument, what is allowed, and what was probably meant."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.client import (
    AsyncDraftClient,
    Breaker,
    ConfigurationError,
    DraftClient,
    HistoSpecError,
    Limits,
    Response,
    Timeouts,
    Tls,
)

NOWHERE = "127.0.0.1:9"
QUICK = Timeouts(step=0.01, call=0.2, ingest=0.2, shutdown=0.1)

Use = Callable[[Any], Any]


@pytest.fixture(scope="module")
def client() -> Iterator[DraftClient]:
    with DraftClient(NOWHERE, "run", timeouts=QUICK) as client:
        client.open([[1], [2]])  # sessions 1 and 2
        yield client


WRONG: list[tuple[Use, str]] = [
    # one of them where a list of them is wanted
    (lambda c: c.open([1, 2, 3]), "prompts: must be a list of prompts; got one prompt, give [prompt]"),
    (lambda c: c.open(np.array([1, 2])), "prompts: must be a list of prompts; got one prompt, give [prompt]"),
    (lambda c: c.open((1, 2), problems=["a"]), "prompts: must be a list of prompts; got one prompt, give [prompt]"),
    (
        lambda c: c.open([[1], [2]], generated=[3, 4]),
        "generated: must be a list of token lists, one for each session; got one token list, give [tokens]",
    ),
    (
        lambda c: c.step([1], [7, 8, 9]),
        "new_tokens: must be a list of token lists, one for each session; got one token list, give [tokens]",
    ),
    (
        lambda c: c.send([1], np.array([7])),
        "new_tokens: must be a list of token lists, one for each session; got one token list, give [tokens]",
    ),
    (lambda c: c.histories([1, 2]), "prompts: must be a list of prompts; got one prompt, give [prompt]"),
    (
        lambda c: c.ingest_many([1, 2], [[], []]),
        "prompts: must be a list of prompts; got one prompt, give [prompt]",
    ),
    (
        lambda c: c.ingest([1], Response([2])),
        "responses: must be a list of responses; got one Response, give [response]",
    ),
    (
        lambda c: c.ingest_many([[1]], [Response([2])]),
        "responses[0]: must be a list of responses; got one Response, give [response]",
    ),
    (
        lambda c: c.ingest([1], [2, 3]),
        "responses: must be a list of responses; got one list of token ids, give [Response(tokens)]",
    ),
    (lambda c: c.ingest([1], [[2, 3]]), "responses[0]: must be a Response, is list; give Response(tokens)"),
    (
        lambda c: c.ingest_many([[1]], [2, 3]),
        "responses: must be a list of response lists, one for each prompt; got one list of token ids, give "
        "[[Response(tokens)]]",
    ),
    (
        lambda c: c.finish([1], logprobs=[-0.5, -0.5]),
        "logprobs: must be a list of logprobs, one list for each session; got one session's logprobs, give [logprobs]",
    ),
    (
        lambda c: c.ingest_many([[1]], [[Response([2])]], seeds=[7]),
        "seeds: must be a list of seed lists, one for each prompt; got one seed list, give [seeds]",
    ),
    # lists where one is wanted
    (
        lambda c: c.ingest([[1, 2]], []),
        "prompt: must be a flat list of token ids; got a list of lists, of shape (1, 2)",
    ),
    (lambda c: c.history([[1], [2, 3]]), "prompt: must be a flat list of token ids; got a list of lists"),
    (
        lambda c: c.open([[[1, 2]]]),
        "prompts[0]: must be a flat list of token ids; got a list of lists, of shape (1, 2)",
    ),
    (lambda c: c.close([[1, 2]]), "sessions[0]: must be a session id, an int, is list"),
    (lambda c: c.close([1], commit=[True]), "commit: must be True or False, is list"),
    # a single value where a list is wanted
    (lambda c: c.close(3), "sessions: must be a list of session ids, is 3; give [3]"),
    (lambda c: c.step(3, [[1]]), "sessions: must be a list of session ids, is 3; give [3]"),
    (lambda c: c.open([[1]], seeds=7), "seeds: must be a list of seeds, is 7; give [7]"),
    (lambda c: c.ingest([1], [Response([2])], seeds=7), "seeds: must be a list of seeds, is 7; give [7]"),
    (lambda c: c.predict_length([1], quantiles=0.5), "quantiles: must be a list of quantiles, is 0.5; give [0.5]"),
    (
        lambda c: c.predict_lengths([[1]], generated=3),
        "generated: must be a list of numbers of generated tokens, one for each prompt, is 3; give [3]",
    ),
    (lambda c: c.predict_lengths([[1]], generated=[0, 1]), "generated: 2 values for 1 prompts"),
    (lambda c: c.predict_lengths([[1], [2]], generated=[0, -1]), "generated[1]: -1 is outside [0, 2^31)"),
    (lambda c: c.open([[1], 2]), "prompts[1]: must be a flat list of token ids, is 2"),
    # text
    (lambda c: c.open([[1], [2]], problems="ab"), "problems: must be a list of problem ids, is 'ab'"),
    (lambda c: c.histories([[1]], problems="a"), "problems: must be a list of problem ids, is 'a'"),
    (lambda c: c.ingest_many([[1]], [[]], problems="a"), "problems: must be a list of problem ids, is 'a'"),
    (lambda c: c.open("ab"), "prompts: must be a list of prompts, is 'ab'"),
    (lambda c: c.open(["ab"]), "prompts[0]: must be token ids, is str; tokenize it first"),
    (lambda c: c.finish("12"), "sessions: must be a list of session ids, is '12'"),
    (lambda c: c.finish(["1"]), "sessions[0]: must be a session id, an int, is '1'"),
    (lambda c: c.finish([1], rewards="1.5"), "rewards: must be a finite number, is '1.5'"),
    (lambda c: c.step([1], [[1]], max_tokens="5"), "max_tokens: must be an integer, is '5'"),
    (lambda c: c.step([1], [[1]], verify_cost="0"), "verify_cost: '0' is not a finite number of at least 0"),
    (lambda c: c.history([1], limit="5"), "limit: must be an integer, is '5'"),
    (lambda c: c.rewind("3"), "epoch: must be an integer, is '3'"),
    (
        lambda c: c.flush("1s"),
        "timeout: must be a number of seconds from 0 to 86400, such as 0.02; is '1s'",
    ),
    (
        lambda c: c.inspect(-1),
        "timeout: must be a number of seconds above 0, at most 86400, such as 0.02; is -1",
    ),
    # what has no order, or is something else altogether
    (lambda c: c.finish({1, 2}), "sessions: must be a list of session ids, is set"),
    (lambda c: c.open({0: [1]}), "prompts: must be a list of prompts, is dict"),
    (lambda c: c.open(x for x in ([1], [2])), "prompts: must be a list of prompts, is generator"),
    (lambda c: c.open(None), "prompts: must be a list of prompts, is None"),
    (lambda c: c.open(np.array(5)), "prompts: must be a list of prompts, is ndarray"),
    (lambda c: c.receive([1]), "pending: must be a Pending, is list; give what send returned"),
    (lambda c: c.open([[1]], problems=[5]), "problems[0]: must be a string, is 5"),
    (lambda c: c.open([[1, None]]), "prompts[0]: must be integers; item 1 is None"),
    # what a message cannot hold
    (lambda c: c.open([[1]], problems=["\ud800"]), "problems[0]: character 0 of '\\ud800' cannot be encoded as UTF-8"),
    (lambda c: c.step([1], [[1]], verify_cost=1e39), "verify_cost: 1e+39 is not a finite number of at least 0"),
    (lambda c: c.finish([1], rewards=1e39), "rewards: must be a finite number, is 1e+39"),
    (lambda c: c.finish([1], rewards=10**400), "rewards: must be a finite number, is an integer of 1329 bits"),
]


@pytest.mark.parametrize(("use", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_the_sentence_says_what_was_meant(client: DraftClient, use: Use, sentence: str) -> None:
    before = client.stats().steps
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole sentence is compared
        use(client)
    assert str(caught.value) == sentence
    assert not isinstance(caught.value, HistoSpecError)  # the client did not call the server
    assert client.stats().steps == before


@pytest.mark.parametrize(("use", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
@pytest.mark.asyncio
async def test_the_asyncio_face_says_the_same(use: Use, sentence: str) -> None:
    async with AsyncDraftClient(NOWHERE, "run", timeouts=QUICK) as client:
        await client.open([[1], [2]])
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            await use(client)
        assert str(caught.value) in (sentence, f"{sentence}, awaited")


@pytest.mark.asyncio
async def test_a_send_that_was_not_awaited() -> None:
    async with AsyncDraftClient(NOWHERE, "run", timeouts=QUICK) as loop_client:
        sent = loop_client.send([], [])
        with pytest.raises(
            ValueError, match=r"^pending: must be a Pending, is coroutine; give what send returned, awaited$"
        ):
            await loop_client.receive(sent)  # type: ignore[arg-type]
        await loop_client.receive(await sent)


def test_what_works_goes_on_working(client: Any) -> None:
    """All kinds of ordered values with integers."""
    for prompts in (
        np.array([[1, 2], [3, 4]]),
        ([1], (2,)),
        {"a": [1]}.values(),
        [range(3)],
        [np.array([1], np.uint8)],
    ):
        assert client.open(prompts)
    sessions = client.open(
        [[1], [2]], problems=np.array(["a", "b"]), seeds=np.array([1, 2]), generated=np.array([[1], [2]])
    )
    sent = client.send(np.array(sessions), np.array([[5, 6], [7, 8]]), np.int64(4), np.float32(0.1))
    assert [len(draft) for draft in client.receive(sent)] == [0, 0]
    client.finish(
        tuple(sessions),
        np.bool_(True),
        epochs=np.array(3),
        rewards=np.array([1, 0], np.float16),
        logprobs=np.zeros((2, 3), np.float64),
    )


def test_torch_tensors_are_sequences(client: Any) -> None:
    torch = pytest.importorskip("torch")
    sessions = client.open(torch.tensor([[1, 2], [3, 4]]), generated=[torch.tensor([], dtype=torch.int32)] * 2)
    client.receive(client.send(sessions, torch.tensor([[5], [6]])))
    logprobs = torch.zeros(2, 1, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"^logprobs\[0\]: must be numbers, Can't call numpy\(\) on Tensor that requires"
    ):
        client.finish(sessions, logprobs=logprobs)
    with pytest.raises(ValueError, match=r"^prompts: must be a list of prompts; got one prompt, give \[prompt\]$"):
        client.open(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^sessions\[0\]: must be a session id, an int, is Tensor$"):
        client.finish(torch.tensor(sessions))
    client.finish(sessions, rewards=torch.tensor(0.5), logprobs=logprobs.detach())


def test_white_space_of_a_problem_id_is_part_of_it(client: DraftClient) -> None:
    client.finish(client.open([[1]], problems=[" task-17\n"]), commit=False)


DEADLINE = "must be a number of seconds above 0, at most 86400, such as 0.02; is"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"deadline": "20ms"}, f"deadline: {DEADLINE} '20ms'"),
        ({"deadline": "0.02"}, f"deadline: {DEADLINE} '0.02'"),
        ({"deadline": -1}, f"deadline: {DEADLINE} -1"),
        ({"deadline": float("inf")}, f"deadline: {DEADLINE} inf"),
        ({"deadline": True}, f"deadline: {DEADLINE} True"),
        ({"deadline": [0.02]}, f"deadline: {DEADLINE} list"),
        ({"timeouts": 5}, "timeouts: must be a Timeouts, is 5; give histospec.client.Timeouts(...)"),
        ({"breaker": False}, "breaker: must be a Breaker, is False; give histospec.client.Breaker(...)"),
        ({"limits": {}}, "limits: must be a Limits, is dict; give histospec.client.Limits(...)"),
        (
            {"tls": "ca.pem"},
            "tls: must be True, False or a Tls, is 'ca.pem'; for a file of authorities give Tls(ca='ca.pem')",
        ),
        ({"tls": 1}, "tls: must be True, False or a Tls, is 1"),
        ({"token": "abc\n"}, "token: begins or ends with white space or a line break; remove it"),
        ({"token": "ab\nc"}, "token: character 3 is not printable ASCII; correct the token"),
        ({"token": "schlüssel"}, "token: character 5 is not printable ASCII; correct the token"),
        ({"token": b"abc"}, "token: must be a string, is bytes"),
        ({"endpoint": ["h:1", "h:2"]}, "endpoint: must be a string, such as 'host:6378,host2:6378'; is list"),
        ({"endpoint": "h:70000"}, "endpoint: the port of 'h:70000' is outside [1, 65535]"),
        ({"endpoint": "a =h:1"}, "endpoint: the shard name 'a ' begins or ends with white space; give 'a'"),
        ({"namespace": 7}, "namespace: must be a string, such as 'run-1'; is 7"),
        ({"namespace": "run "}, "namespace: 'run ' begins or ends with white space; give 'run'"),
        ({"namespace": "run\n"}, "namespace: 'run\\n' begins or ends with white space; give 'run'"),
        ({"namespace": " \t"}, "namespace: ' \\t' is white space alone"),
        ({"namespace": "\ud800"}, "namespace: character 0 of '\\ud800' cannot be encoded as UTF-8"),
    ],
)  # fmt: skip
def test_the_configuration_says_what_is_allowed(arguments: dict[str, Any], sentence: str) -> None:
    for face in (DraftClient, AsyncDraftClient):
        with pytest.raises(ConfigurationError) as caught:
            face(**{"endpoint": NOWHERE, "namespace": "run"} | arguments)
        assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Timeouts(step=-1), f"Timeouts.step: {DEADLINE} -1"),
        (lambda: Timeouts(call="1"), f"Timeouts.call: {DEADLINE} '1'"),  # type: ignore[arg-type]
        (lambda: Timeouts(shutdown=0), f"Timeouts.shutdown: {DEADLINE} 0"),
        (lambda: Timeouts(leave=float("nan")), f"Timeouts.leave: {DEADLINE} nan"),
        (lambda: Timeouts(silence=1e9), f"Timeouts.silence: {DEADLINE} 1000000000.0"),
        (lambda: Breaker(failures=0), "Breaker.failures: 0 is outside [1, 2147483648]"),
        (lambda: Breaker(failures=1.5), "Breaker.failures: must be an integer, is 1.5"),  # type: ignore[arg-type]
        (lambda: Breaker(cooldown=0), f"Breaker.cooldown: {DEADLINE} 0"),
        (
            lambda: Breaker(cooldown=9),
            "Breaker.cooldown_max: 5.0 is less than Breaker.cooldown, 9; raise it",
        ),
        (lambda: Breaker(jitter=-0.1), "Breaker.jitter: must be a number from 0 to 1, is -0.1"),
        (lambda: Limits(commits=-1), "Limits.commits: -1 is outside [0, 2^62]"),
        (lambda: Limits(commit_bytes=1e9), "Limits.commit_bytes: must be an integer, is 1000000000.0"),  # type: ignore[arg-type]
        (lambda: Limits(message_bytes=0), "Limits.message_bytes: 0 is outside [1, 2^62]"),
        (lambda: Limits(batch=1 << 70), "Limits.batch: 1180591620717411303424 is outside [1, 2^62]"),
        (lambda: Tls(True), "Tls.ca: must be the path of a file, is True"),  # type: ignore[arg-type]
        (lambda: Tls(certificate="c.pem"), "tls: a client certificate needs its key, and a key its certificate"),
    ],
)
def test_values_that_cannot_work_are_named_where_they_are_made(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("HISTOSPEC_DEADLINE", "20ms", f"HISTOSPEC_DEADLINE: {DEADLINE} '20ms'"),
        ("HISTOSPEC_LEAVE_SECONDS", "30s", f"HISTOSPEC_LEAVE_SECONDS: {DEADLINE} '30s'"),
        ("HISTOSPEC_LEAVE_SECONDS", "0", f"HISTOSPEC_LEAVE_SECONDS: {DEADLINE} 0.0"),
        ("HISTOSPEC_LEAVE_SECONDS", "86401", f"HISTOSPEC_LEAVE_SECONDS: {DEADLINE} 86401.0"),
        ("HISTOSPEC_NAMESPACE", "run ", "HISTOSPEC_NAMESPACE: 'run ' begins or ends with white space; give 'run'"),
        ("HISTOSPEC_TOKEN", "abc\n", "HISTOSPEC_TOKEN: begins or ends with white space or a line break; remove it"),
        (
            "HISTOSPEC_TLS_KEY",
            "k.pem",
            "tls: a client certificate needs its key, and a key its certificate; only HISTOSPEC_TLS_KEY is given",
        ),
    ],
)
def test_the_environment_is_named_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv("HISTOSPEC_NAMESPACE", "run")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        DraftClient(NOWHERE)
    assert str(caught.value) == sentence


def test_a_token_file_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("HISTOSPEC_TOKEN_FILE", str(file))
    file.write_bytes("schlüssel".encode())
    with (
        DraftClient(NOWHERE, "run", timeouts=QUICK) as client,
        pytest.raises(ConfigurationError, match="HISTOSPEC_TOKEN_FILE: character 5 is not printable ASCII"),
    ):
        client.history([1])
