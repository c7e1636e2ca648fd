"""Asynchronous trainers abort requests for new weights and send prompt and partial text again: one response each."""

from typing import Any

import pytest

from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine, let_workers_know
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

MOST = 60


def part(rollouts: Any, begun: list[list[int]], most: list[int], steps: int | None = None) -> list[list[int]]:
    """Generates for some steps, then aborts. Returns what the trainer has received by then. steps: None: to the end."""
    from vllm import SamplingParams

    received: dict[str, list[int]] = {}
    for i, (text, tokens) in enumerate(zip(begun, most, strict=True)):
        parameters = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False)
        rollouts.llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": text}, parameters)
    while rollouts.llm.llm_engine.has_unfinished_requests() and steps != 0:
        for output in rollouts.llm.llm_engine.step():
            received[output.request_id] = list(output.outputs[0].token_ids)
        steps = None if steps is None else steps - 1
    rollouts.llm.llm_engine.abort_request([f"{i}" for i in range(len(begun))])
    let_workers_know(rollouts.llm)
    return [received.get(f"{i}", []) for i in range(len(begun))]


def test_three_parts_on_two_engines_are_one_response(
    engine: StartEngine, shared_server: Server, prompts: Prompts, make_client: MakeClient
) -> None:
    """
    1. Two engines share the requests, n = 2 with equal texts; both abort, and each goes on with the other's.
    2. The texts are those of one piece, the history has each of them once for its prompt, and nothing else.
    3. A visit in one piece then has drafts from the first token on: as many are accepted as after visits in one piece.
    """
    both = [engine(shared_server.endpoint), engine(shared_server.endpoint, max_num_seqs=15)]
    plain = [group[0] for group in engine().generate(prompts, max_tokens=MOST)]
    whole: list[list[int]] = [[] for _ in range(2 * len(prompts))]
    twice = [*prompts, *prompts]
    for number, steps in enumerate((3, 2, None)):
        for half, rollouts in enumerate(both):
            mine = [i for i in range(len(twice)) if i % 2 == (half + number) % 2]
            mine = [i for i in mine if len(whole[i]) < MOST]
            more = part(rollouts, [twice[i] + whole[i] for i in mine], [MOST - len(whole[i]) for i in mine], steps)
            for i, tokens in zip(mine, more, strict=True):
                whole[i] += tokens
        if number == 0:
            assert all(0 < len(text) < MOST for text in whole)
    assert whole == [*plain, *plain]
    client = make_client(shared_server.endpoint)
    for prompt, text in zip(prompts, plain, strict=True):
        assert texts(client.history(prompt)) == [text, text]
        assert client.history(prompt + text[:3]) == []
    before = both[0].counter("spec_decode_num_accepted_tokens")
    both[0].generate(prompts, max_tokens=MOST)
    parts = both[0].counter("spec_decode_num_accepted_tokens") - before
    client.drop_namespace()
    for _ in range(2):
        both[0].generate(prompts, max_tokens=MOST)
    before = both[0].counter("spec_decode_num_accepted_tokens")
    both[0].generate(prompts, max_tokens=MOST)
    assert parts >= 0.98 * (both[0].counter("spec_decode_num_accepted_tokens") - before)


def test_requests_that_never_go_on_leave_nothing(
    engine: StartEngine, shared_server: Server, prompts: Prompts, make_client: MakeClient
) -> None:
    rollouts = engine(shared_server.endpoint)
    received = part(rollouts, prompts, [MOST] * len(prompts), steps=3)
    assert all(received)
    client = make_client(shared_server.endpoint)
    assert [client.history(prompt) for prompt in prompts] == [[]] * len(prompts)
    assert shared_server.metrics()["histospec_sessions"] == 0
