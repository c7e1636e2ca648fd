"""What the scheduler prepares while the model computes divides a step as its requests do, one by one."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.servers import Server
from tests.vllm.conftest import ASYNCHRONOUS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.newest,
    pytest.mark.skipif(ASYNCHRONOUS, reason="the scheduler of synchronous steps"),
]

ENGINES: list[dict[str, Any]] = [
    {},
    {"num_gpu_blocks_override": 20, "block_size": 32, "enable_prefix_caching": False},  # preempts requests
    {"max_num_batched_tokens": 24, "max_num_seqs": 4},  # reads prompts in chunks
    {"max_model_len": 128},
]
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 120},
    {"max_tokens": 60, "min_tokens": 20, "stop_token_ids": [3, 9, 17]},
    {"max_tokens": 60, "stop_token_ids": [5]},
]


@pytest.fixture
def told(engine: StartEngine, shared_server: Server) -> Callable[..., tuple[Any, list[Any], list[Any]]]:
    """told(...) -> an engine; each division, that without preparation, how many were prepared; lengths and places."""

    def start(**arguments: Any) -> tuple[Any, list[Any], list[Any]]:
        rollouts = engine(shared_server.endpoint, **arguments)
        scheduler, divided, lengths = rollouts.scheduler, list[Any](), list[Any]()
        divide, receive = scheduler._divide, scheduler._receive

        def dividing(output: Any) -> Any:
            prepared, scheduler._ready = scheduler._ready, scheduler._ready._replace(requests=set())
            alone = divide(output)
            scheduler._ready = prepared
            found = divide(output)
            divided.append((found, alone, len(prepared.requests & {*output.req_ids})))
            return found

        def receiving(model: Any) -> Any:
            rows = receive(model)
            for request_id, row in zip(model.req_ids, rows or (), strict=False):
                lengths.append((len(row), scheduler._places(request_id)))
            return rows

        scheduler._divide, scheduler._receive = dividing, receiving
        return rollouts, divided, lengths

    return start


@pytest.fixture
def check(shared_server: Server, make_client: MakeClient) -> Callable[..., None]:
    """check(prompts, responses): the history has each response twice, as of two visits with the same outcome."""

    def compare(prompts: Prompts, responses: Any) -> None:
        client = make_client(shared_server.endpoint)
        for prompt, group in zip(prompts, responses, strict=True):
            assert texts(client.history(prompt)) == group * 2

    return compare


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("arguments", ENGINES)
def test_prepared_steps_are_divided_as_others(
    told: Callable[..., Any],
    prompts: Prompts,
    check: Callable[..., None],
    arguments: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    rollouts, divided, lengths = told(**arguments)
    first, second = (rollouts.generate(prompts, **sampling) for _ in range(2))
    assert first == second
    assert all(found == alone for found, alone, _ in divided)
    assert sum(ready for _, _, ready in divided) > 0
    assert all(length <= places for length, places in lengths)
    assert any(length for length, _ in lengths)
    check(prompts, first)


def test_repetitions_end_responses_at_any_token(
    told: Callable[..., Any], prompts: Prompts, check: Callable[..., None]
) -> None:
    from vllm.sampling_params import RepetitionDetectionParams

    rollouts, divided, _ = told()
    detection = RepetitionDetectionParams(max_pattern_size=20, min_pattern_size=1, min_count=2)
    first, second = (rollouts.generate(prompts, max_tokens=120, repetition_detection=detection) for _ in range(2))
    assert first == second
    assert any(len(group[0]) < 120 for group in first)
    assert not any(ready for *_, ready in divided)
    check(prompts, first)


@pytest.mark.parametrize("silent", [False, True])
def test_a_step_that_vllm_discards_is_not_kept(
    told: Callable[..., Any], prompts: Prompts, check: Callable[..., None], silent: bool
) -> None:
    """As after a failed load: the session was sent tokens that the request does not get, as many as it gets next.

    Also if no drafts are asked for from then on.
    """
    rollouts, divided, _ = told()
    expected = rollouts.generate(prompts, max_tokens=120)
    rollouts.start(prompts, max_tokens=120)
    rollouts.step(2)
    scheduler = rollouts.scheduler
    running = [request.request_id for request in scheduler.running]
    scheduler._sessions.report({request: [1, 2, 3] for request in running})
    if silent:
        scheduler._silent, scheduler._chooser.next = 1, lambda: None
    rollouts.step()
    assert silent or all(scheduler._sessions.sent(r.request_id) == r.num_output_tokens for r in scheduler.running)
    assert rollouts.finish() == expected
    assert all(found == alone for found, alone, _ in divided)
    check(prompts, expected)
