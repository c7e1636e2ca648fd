"""Requests that end without a response: they get no session, and nothing of them joins the history."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

REMOTE = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
OTHERS: dict[str, dict[str, Any]] = {
    "score their prompt": {"prompt_logprobs": 0, "max_tokens": 1},
    "score their prompt, with vLLM's default of max_tokens": {"prompt_logprobs": 0, "max_tokens": 16},
    "ask for one token": {"max_tokens": 1, "logprobs": 5},
    "prefill for another engine": {"max_tokens": 8, "extra_args": REMOTE},
    "are switched off": {"max_tokens": 8, "extra_args": {"histospec": False}},
}


@pytest.fixture
def sessions(shared_server: Server, namespace: str) -> Callable[[], float]:
    """sessions() -> how many sessions of this test the server opened."""
    name = f'histospec_problem_lookups_total{{namespace="{namespace}",'
    return lambda: sum(value for sample, value in shared_server.metrics().items() if sample.startswith(name))


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_rollout_adds_nothing(
    engine: StartEngine,
    shared_server: Server,
    make_client: MakeClient,
    prompts: Prompts,
    sessions: Callable[[], float],
    what: str,
) -> None:
    """Trainers score prompt and response together, which looks like a later turn of the problem."""
    rollouts = engine(shared_server.endpoint)
    responses = rollouts.generate(prompts)
    opened = sessions()
    scored = [prompt + group[0] for prompt, group in zip(prompts, responses, strict=True)]
    scored[0] = prompts[0]
    others = rollouts.generate(scored, **OTHERS[what])
    assert all(others)
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, responses, strict=True):
        assert texts(client.history(prompt)) == group
    assert sessions() == opened == len(prompts)


@pytest.mark.parametrize("option", [{"problem": "p"}, {"epoch": 3}, {"commit": True}])
@pytest.mark.parametrize("what", ["score their prompt", "ask for one token", "prefill for another engine"])
def test_an_option_makes_it_a_rollout(
    engine: StartEngine,
    shared_server: Server,
    make_client: MakeClient,
    prompts: Prompts,
    what: str,
    option: dict[str, Any],
) -> None:
    sampling = dict(OTHERS[what])
    sampling["extra_args"] = {**sampling.get("extra_args", {}), "histospec": option}
    [group] = engine(shared_server.endpoint).generate(prompts[:1], **sampling)
    client = make_client(shared_server.endpoint)
    assert texts(client.history(prompts[0], problem=option.get("problem"))) == group


def test_the_engine_that_decodes_after_a_remote_prefill_writes_rollouts(
    engine: StartEngine, shared_server: Server, make_client: MakeClient, prompts: Prompts
) -> None:
    remote = {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True}}
    responses = engine(shared_server.endpoint).generate(prompts, extra_args=remote)
    client = make_client(shared_server.endpoint)
    assert [texts(client.history(prompt)) for prompt in prompts] == responses


def test_the_last_token_of_an_aborted_response_is_part_of_a_rollout(
    engine: StartEngine, shared_server: Server, make_client: MakeClient, prompts: Prompts
) -> None:
    rollouts = engine(shared_server.endpoint)
    prompt = prompts[0]
    rollouts.start([prompt])
    rollouts.step(9)
    (request,) = rollouts.scheduler.requests.values()
    begun = list(request.output_token_ids)
    rollouts.llm.llm_engine.abort_request(rollouts.ids)
    client = make_client(shared_server.endpoint)
    assert begun
    assert rollouts.generate([prompt + begun], max_tokens=1, prompt_logprobs=0)
    assert client.history(prompt) == []  # scoring it does not end it
    [[last]] = rollouts.generate([prompt + begun], max_tokens=1)
    assert texts(client.history(prompt)) == [[*begun, *last]]


def test_beam_search(
    engine: StartEngine, shared_server: Server, make_client: MakeClient, prompts: Prompts, sessions: Callable[[], float]
) -> None:
    from vllm.sampling_params import BeamSearchParams

    def search(endpoint: str | None) -> list[list[int]]:
        rollouts = engine(endpoint, skip_tokenizer_init=False)
        beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
        outputs = rollouts.llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts[:4]], beams)
        return [list(beam.tokens) for output in outputs for beam in output.sequences]

    assert search(shared_server.endpoint) == search(None)
    assert sessions() == 0
    client = make_client(shared_server.endpoint)
    assert [client.history(prompt) for prompt in prompts[:4]] == [[]] * 4
