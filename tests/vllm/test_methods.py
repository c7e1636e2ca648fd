"""With every drafter of vLLM's own, greedy output and the history are the same as without drafts."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from histospec.client import Response
from histospec.client.vllm.choice.modes import BOTH, DRAFTER, NOTHING, SERVER, Mode
from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.servers import Server
from tests.support.told import Told

pytestmark = [pytest.mark.vllm, pytest.mark.v1]

LIMIT = 96  # tokens of a context, where there is little room
TIGHT = {
    "max_model_len": LIMIT,
    "max_num_batched_tokens": 48,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "enable_chunked_prefill": True,
}
LONG = 200  # tokens of a response, in which both drafters get their turn
LONGER = [pytest.param(method, marks=pytest.mark.long) for method in ("eagle3", "medusa", "mtp")]
METHODS = ["eagle", pytest.param("draft_model", marks=pytest.mark.long), *LONGER]
WITH_DRAFT_MODEL = pytest.mark.parametrize("method", ["draft_model", "eagle", *LONGER], indirect=True)
"""`make test` runs the test with a draft model, too; other tests only `make test-long`."""


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def both(
    method: str, engine: StartEngine, drafter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """both(endpoint, ...) -> an engine that drafts with the method and from the server; arguments as `engine`'s."""
    monkeypatch.setenv("HISTOSPEC_MODEL_DRAFT_TOKENS", "3")

    def start(endpoint: str, **arguments: Any) -> Any:
        # Medusa drafts a token a head, and has three.
        speculative = drafter(method, 3 if method == "medusa" else 16)
        return engine(endpoint, speculative_config=speculative, **plain(method, drafter) | arguments)

    return start


@pytest.fixture
def truth(method: str, engine: StartEngine, drafter: Callable[..., Any]) -> Callable[..., Any]:
    """truth(prompts, ...) -> what the same model writes without drafts."""
    return lambda prompts, **sampling: engine(**plain(method, drafter)).generate(prompts, **sampling)


def plain(method: str, drafter: Callable[..., Any]) -> dict[str, Any]:
    """vLLM's arguments for the model that a method drafts for: its layer for MTP is part of it."""
    return {"model": drafter(method)["model"], "async_scheduling": False} if method == "mtp" else {}


@WITH_DRAFT_MODEL
def test_history_empty_right_and_wrong(
    both: Callable[..., Any],
    truth: Callable[..., Any],
    shared_server: Server,
    prompts: Prompts,
    make_client: MakeClient,
) -> None:
    """Every visit writes the same; both drafters take part; the server keeps exactly what was written."""
    expected = truth(prompts, max_tokens=LONG)
    rollouts = both(shared_server.endpoint)
    told = Told(rollouts)
    client = make_client(shared_server.endpoint)
    assert rollouts.generate(prompts, max_tokens=LONG) == expected
    assert told.drafted > told.accepted > LONG  # of another's draft: more than luck
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group

    first = told.history
    assert rollouts.generate(prompts, max_tokens=LONG) == expected
    assert told.history - first > LONG * len(prompts) / 2  # drafts from history are sure

    for prompt, group in zip(prompts, expected, strict=True):  # and now they are right for a while, and then wrong
        wrong = [tokens[:i] + [(token + 1) % 32 for token in tokens[i:]] for i, tokens in enumerate(group * 3, 5)]
        client.ingest(prompt, [Response(tokens) for tokens in wrong], epoch=9)
    assert rollouts.generate(prompts, max_tokens=LONG) == expected


@WITH_DRAFT_MODEL
def test_the_server_killed_half_way(
    both: Callable[..., Any], truth: Callable[..., Any], server: Server, prompts: Prompts
) -> None:
    expected = truth(prompts, max_tokens=LONG)
    rollouts = both(server.endpoint)
    told = Told(rollouts)
    assert rollouts.generate(prompts, max_tokens=LONG) == expected
    rollouts.start(prompts, max_tokens=LONG)
    rollouts.step(5)
    assert rollouts.scheduler.running
    server.kill()
    drafted = told.drafted
    assert rollouts.finish() == expected
    assert rollouts.generate(prompts, max_tokens=LONG) == expected  # a whole visit without it
    assert told.drafted > drafted  # the model's drafter goes on


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": [3, 7]},
        {"stop_token_ids": [3, 7], "min_tokens": 20},
        {"temperature": 1, "top_k": 1, "n": 3},  # greedy in all but the name
        {"presence_penalty": 0.7, "repetition_penalty": 1.1, "logprobs": 2},
        {"max_tokens": 2},
    ],
    ids=["stops", "min_tokens", "n", "penalties", "short"],
)
def test_how_a_response_ends(
    both: Callable[..., Any],
    truth: Callable[..., Any],
    shared_server: Server,
    prompts: Prompts,
    make_client: MakeClient,
    sampling: dict[str, Any],
) -> None:
    expected = truth(prompts, **{"max_tokens": 60} | sampling)
    rollouts = both(shared_server.endpoint)
    for _ in range(2):
        assert rollouts.generate(prompts, **{"max_tokens": 60} | sampling) == expected
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2


def test_little_room(
    both: Callable[..., Any], truth: Callable[..., Any], shared_server: Server, make_client: MakeClient
) -> None:
    """Requests are preempted, prompts come in chunks, and all run into the longest context."""
    prompts = [[(5 * i + j * j) % 32 for j in range(6 + 5 * i)] for i in range(12)]
    whole = truth(prompts, max_tokens=LIMIT)
    expected = [
        [tokens[: LIMIT - len(prompt)] for tokens in group] for prompt, group in zip(prompts, whole, strict=True)
    ]
    rollouts = both(shared_server.endpoint, **TIGHT)
    told = Told(rollouts)
    for _ in range(2):
        assert rollouts.generate(prompts, max_tokens=LIMIT) == expected
    assert rollouts.counter("num_preemptions") > 0
    assert told.accepted > 0
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2


@pytest.mark.parametrize("tokens", ["3", "16"])
def test_zeros_are_no_drafts(
    both: Callable[..., Any],
    truth: Callable[..., Any],
    method: str,
    nowhere: str,
    monkeypatch: pytest.MonkeyPatch,
    tokens: str,
) -> None:
    """While one request is near the longest context, vLLM drafts as many zeros as it can for every request."""
    monkeypatch.setenv("HISTOSPEC_MODEL_DRAFT_TOKENS", tokens)
    prompts = [[(j * j) % 32 for j in range(LIMIT - 12)], [1, 2], [3, 4, 5]]
    expected = truth(prompts, max_tokens=12)
    rollouts = both(nowhere, **TIGHT)
    assert rollouts.generate(prompts, max_tokens=12) == expected
    assert (rollouts.counter("spec_decode_num_draft_tokens") > 0) == (method == "medusa")  # which would have room
    assert rollouts.generate(prompts[1:], max_tokens=12) == expected[1:]
    assert rollouts.counter("spec_decode_num_draft_tokens") > 0


@pytest.mark.parametrize("tokens", ["0", "1", "64", "auto"])
def test_how_much_the_drafter_makes(
    both: Callable[..., Any],
    truth: Callable[..., Any],
    shared_server: Server,
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
    tokens: str,
) -> None:
    """From nothing, not even its first pass, to what pays; what is known by then is drafted in any case."""
    expected = truth(prompts, max_tokens=LONG)
    monkeypatch.setenv("HISTOSPEC_MODEL_DRAFT_TOKENS", tokens)
    rollouts = both(shared_server.endpoint)
    told = Told(rollouts)
    for _ in range(2):
        assert rollouts.generate(prompts, max_tokens=LONG) == expected
    assert rollouts.counter("spec_decode_num_accepted_tokens") > LONG
    assert (told.drafted > 0) == (tokens != "0")
    assert (told.history > 0) == (tokens != "0")  # without the model's drafts there is nothing to report


def test_modes_of_drafting_come_and_go(
    both: Callable[..., Any],
    truth: Callable[..., Any],
    shared_server: Server,
    prompts: Prompts,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of steps in each of the four modes, of every length: output and history stay exact."""
    monkeypatch.delenv("HISTOSPEC_VERIFY_COST")
    monkeypatch.setenv("HISTOSPEC_MODEL_DRAFT_TOKENS", "auto")
    expected = truth(prompts, max_tokens=LONG)
    rollouts = both(shared_server.endpoint)
    told, chooser = Told(rollouts), rollouts.scheduler._chooser
    runs = ((mode, run) for run in itertools.count(1) for mode in (DRAFTER, SERVER, NOTHING, BOTH))
    modes = (mode for mode, run in runs for _ in range(run))
    taken: set[Mode] = set()

    def observe(*_: Any) -> None:
        chooser._enter(next(modes))
        taken.add(chooser._mode)

    monkeypatch.setattr(chooser, "observe", observe)
    monkeypatch.setattr(chooser, "passes", lambda: False)
    monkeypatch.setattr(chooser, "_begin_requests", lambda: None)
    for _ in range(3):
        assert rollouts.generate(prompts, max_tokens=LONG) == expected
    assert taken == {NOTHING, SERVER, DRAFTER, BOTH}
    assert told.drafted > 0
    assert told.history > 0
    rollouts.close()  # the last commits are out by now
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 3
