"""HISTOSPEC_ENABLE=1 and no line of the page: verl's server drafts."""

from collections.abc import Callable
from typing import Any

import pytest

from histospec.client import DraftClient
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.verl.conftest import NAMESPACE

PROMPT = list(range(8))


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    return {"HISTOSPEC_ENABLE": "1"}


def test_verl_drafts_without_a_line_of_the_page(start_run: Callable[..., Any], shared_server: Server) -> None:
    run = start_run()
    arguments = run.ray.get(run.server.engine_arguments.remote())
    assert arguments["speculative_config"] is arguments["scheduler_cls"] is None
    with DraftClient(shared_server.endpoint, NAMESPACE) as client:

        def visit(count: int) -> Any:
            """Returns the response of a visit, once the history has `count`."""
            greedy = {"temperature": 0.0, "max_tokens": 60}
            answer = run.ray.get(run.server.generate.remote(PROMPT, greedy, f"visit-{count}"))
            eventually(lambda: len(client.history(PROMPT)) == count, "a response was not stored")
            return answer.token_ids

        first, second = visit(1), visit(2)
    assert first == second
    assert shared_server.total("histospec_accepted_tokens_total") > len(first) / 2
