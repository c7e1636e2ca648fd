"""`DraftClient.keep`: what it stores, and that no fault of a server and no odd reward ends a training."""

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from histospec.client import (
    AsyncDraftClient,
    DeadlineExceeded,
    DraftClient,
    Response,
    Timeouts,
    Unavailable,
    WrongLoop,
)
from histospec.client.config import configure
from histospec.client.core.core import Core
from histospec.client.transport import keeping
from histospec.client.transport.keeping import Keeper
from tests.support.clients import texts
from tests.support.servers import Server, Starter

NOWHERE = "127.0.0.1:9"
PATIENT = Timeouts(keep=60.0, shutdown=60.0)
HASTY = Timeouts(keep=0.3, shutdown=0.1)
PROMPTS, RESPONSES = [[1, 2], [1, 2], [1, 3]], [[5, 6], [7, 8], [9]]


def blocking(endpoint: str, timeouts: Timeouts, *batches: dict[str, Any]) -> list[list[bool]]:
    with DraftClient(endpoint, "keep", timeouts=timeouts) as client:
        return [client.keep(**batch) for batch in batches]


def on_a_loop(endpoint: str, timeouts: Timeouts, *batches: dict[str, Any]) -> list[list[bool]]:
    async def run() -> list[list[bool]]:
        async with AsyncDraftClient(endpoint, "keep", timeouts=timeouts) as client:
            return [await client.keep(**batch) for batch in batches]

    return asyncio.run(run())


faces = pytest.mark.parametrize("face", [blocking, on_a_loop])
BATCH = {"prompts": PROMPTS, "responses": RESPONSES}


@pytest.fixture
def stored(start_server: Starter) -> Iterator[tuple[Server, Callable[[list[int]], list[Response]]]]:
    server = start_server()
    with DraftClient(server.endpoint, "keep", timeouts=PATIENT) as reader:
        yield server, reader.history


@faces
def test_it_stores_the_columns_of_a_batch(face: Any, stored: Any) -> None:
    server, history = stored
    columns = {
        "rewards": [1.0, [0.25, 0.5], np.float32(2)],
        "logprobs": [[-1.0, -2.0], None, np.array([-3.0])],
        "generated": [[1, 0], None, np.array([True])],
        "epoch": [4, 4, 5],
        "problems": [None, None, "id"],
        "seeds": [7, None, None],
    }
    assert face(server.endpoint, PATIENT, BATCH | columns) == [[True] * 3]
    first, second = history([1, 2])
    assert (first.tokens.tolist(), first.reward, first.epoch, first.seed) == ([5, 6], 1.0, 4, 7)
    assert (first.logprobs.tolist(), first.generated.tolist()) == ([-1, -2], [True, False])
    assert (second.tokens.tolist(), second.reward, second.logprobs, second.generated) == ([7, 8], 0.75, None, None)
    (third,) = history([1, 3], "id")
    assert (third.reward, third.epoch, third.logprobs.tolist()) == (2.0, 5, [-3.0])


@faces
def test_what_a_trainer_could_not_compute_is_left_out(face: Any, stored: Any) -> None:
    server, history = stored
    rewards = [[math.nan, None, math.inf], [[1.0, None], [math.nan, 1.0], []], [-math.inf, 1e39, 10**400]]
    logprobs = [[None, -1.0], [math.nan, -1.0], []]
    batches = [BATCH | {"rewards": some, "logprobs": logprobs} for some in rewards]
    assert face(server.endpoint, PATIENT, *batches) == [[True] * 3] * 3
    kept = history([1, 2]) + history([1, 3])
    assert len(kept) == 9
    assert {(r.reward, r.logprobs) for r in kept} == {(None, None)}


@faces
def test_a_response_without_tokens_is_not_stored(face: Any, stored: Any) -> None:
    server, history = stored
    given = {"prompts": PROMPTS, "responses": [[], np.array([7]), Response([9], reward=3.0)]}
    assert face(server.endpoint, PATIENT, given) == [[False, True, True]]
    assert texts(history([1, 2])) == [[7]]
    assert [r.reward for r in history([1, 3])] == [3.0]
    assert face(server.endpoint, PATIENT, {"prompts": [], "responses": []}) == [[]]


@faces
def test_siblings_travel_together(face: Any, stored: Any) -> None:
    """One message for each problem and epoch, in whatever order the rows are."""
    server, history = stored
    many = {"prompts": [[1, 2], [1, 3]] * 32, "responses": [[n + 1] for n in range(64)], "epoch": 1}
    assert face(server.endpoint, PATIENT, many) == [[True] * 64]
    assert len(history([1, 2])) == len(history([1, 3])) == 32
    assert server.metrics()['histospec_rpc_seconds_count{method="Ingest"}'] == 2


@faces
def test_what_the_program_did_wrong_is_an_error(face: Any) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"responses": RESPONSES[:2]}, "responses: 2 values for 3 prompts"),
        ({"responses": RESPONSES[0]}, "responses: "),
        ({"prompts": [1, 2, 3]}, r"prompts: must be a list of prompts; got one prompt, give \[prompt\]"),
        ({"rewards": [1.0]}, "rewards: 1 values for 3 prompts"),
        ({"rewards": 1.0}, "rewards: must be a list"),
        ({"rewards": ["good", 1, 1]}, r"rewards\[0\]: must be numbers"),
        ({"logprobs": [[-1.0], None, None]}, r"logprobs\[0\]: must have one value for each of the 2 tokens"),
        ({"generated": [[1], None, None]}, r"responses\[0\]\.generated: must have one value for each of the 2"),
        ({"responses": [[5, -100], [7], [9]]}, r"responses\[0\]\.tokens: token -100 is outside"),
        ({"epoch": -1}, "epoch: -1 is outside"),
        ({"epoch": [1, 2]}, "epoch: 2 values for 3 prompts"),
        ({"problems": [1, 2, 3]}, r"problem.*: must be a string"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            face(NOWHERE, HASTY, BATCH | change)


@faces
def test_a_response_that_is_too_old_is_not_stored(face: Any, start_server: Starter) -> None:
    server = start_server("--history-epochs", "2")
    batches = [{"prompts": [[1]] * 2, "responses": [[5], [6]], "epoch": epoch} for epoch in ([8, 8], [9, 9], [7, 9])]
    assert face(server.endpoint, PATIENT, *batches) == [[True, True], [True, True], [False, True]]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "histospec.client" and "lost" in r.getMessage()]


@faces
def test_a_server_that_is_away_is_named_once(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert face(NOWHERE, PATIENT, *[BATCH] * 3) == [[False] * 3] * 3
    first, rest = lines(caplog)  # the rest when the client ends
    assert first.startswith(f"HistoSpec: {NOWHERE}: lost 3 finished responses of 5 tokens: Ingest on {NOWHERE}: ")
    assert "lost 6 finished responses of 10 tokens" in rest


@faces
def test_a_server_that_hangs_is_waited_for_once_a_batch(
    face: Any, start_server: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    """40 problems are more than are asked for at a time."""
    server = start_server()
    os.kill(server.pid, signal.SIGSTOP)
    many = {"prompts": [[n + 1] for n in range(40)], "responses": [[5]] * 40}
    try:
        assert face(server.endpoint, HASTY, many) == [[False] * 40]
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert face(server.endpoint, PATIENT, many) == [[True] * 40]
    (line,) = lines(caplog)
    assert "lost 40 finished responses of 40 tokens" in line


@faces
def test_a_server_that_goes_on_refusing_ends_nothing(
    face: Any, start_server: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    """One response is too long; the others are stored."""
    server = start_server("--max-session-tokens", "64")
    batch = {"prompts": PROMPTS, "responses": [[5], [7], [9] * 65]}
    assert face(server.endpoint, PATIENT, batch) == [[True, True, False]]
    (line,) = lines(caplog)
    assert "65 are more than the limit of 64" in line


@faces
def test_a_token_that_may_not_write_ends_nothing(
    face: Any, start_server: Starter, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "a"\nsecret = "a-secret-of-some-length"\n')
    tokens.chmod(0o600)
    server = start_server("--tokens", str(tokens))
    monkeypatch.setenv("HISTOSPEC_TOKEN", "another-secret-of-some-length")
    assert face(server.endpoint, PATIENT, BATCH) == [[False] * 3]
    assert len(lines(caplog)) == 1
    monkeypatch.delenv("HISTOSPEC_TOKEN")
    monkeypatch.setenv("HISTOSPEC_TOKEN_FILE", str(tmp_path / "gone"))
    assert face(server.endpoint, PATIENT, BATCH) == [[False] * 3]


def test_a_client_that_is_shut_down_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = DraftClient(NOWHERE, "keep", timeouts=HASTY)
    client.shutdown()
    assert client.keep(**BATCH) == [False] * 3  # type: ignore[arg-type]
    assert "this client is shut down" in lines(caplog)[0]


def test_another_loop_is_a_mistake_of_the_program(shared_server: Server) -> None:
    client = AsyncDraftClient(shared_server.endpoint, "keep-loops", timeouts=PATIENT)
    assert asyncio.run(client.keep(PROMPTS, RESPONSES)) == [True] * 3
    with pytest.raises(WrongLoop):
        asyncio.run(client.keep(PROMPTS, RESPONSES))
    asyncio.run(client.shutdown())


def test_one_shard_of_two_is_away(start_server: Starter) -> None:
    server = start_server()
    prompts = [[n + 1] for n in range(32)]
    (kept,) = blocking(f"a={server.endpoint},b={NOWHERE}", PATIENT, {"prompts": prompts, "responses": [[5]] * 32})
    assert 0 < sum(kept) < 32
    with DraftClient(server.endpoint, "keep", timeouts=PATIENT) as reader:
        assert [len(reader.history(prompt)) for prompt in prompts] == kept


def test_a_shard_that_hung_gets_the_full_time_once_a_minute() -> None:
    """A trainer with a call for each response must not wait for all of it each time."""
    config = configure(NOWHERE, "keep", timeouts=PATIENT)
    keeper = Keeper(Core(config, lambda: None))
    start = time.monotonic()

    def patience(at: float, error: Exception | None = None) -> float:
        """The time that a batch gets which begins then, rounded to seconds, and fails with an error."""
        batch = keeping.batch(config, PROMPTS[:1], RESPONSES[:1])
        batch.begun = start + at
        (group,) = batch.groups
        sent = keeper.calls(batch, group)
        call = next(sent)
        if error is None:
            assert next(sent, None) is None
        else:
            keeper.lose(batch, group, error)
        return round(call.timeout + time.monotonic() - batch.begun)

    hung, away = DeadlineExceeded("no answer"), Unavailable("connection refused")
    assert [patience(0, away), patience(1, hung)] == [60, 60]
    assert [patience(2, hung), patience(30, hung), patience(60, away)] == [6, 6, 6]
    assert [patience(61, hung), patience(62, hung)] == [60, 6]
    assert [patience(63), patience(64)] == [6, 60]
