"""Every response gets the epoch of its weights: from the request, from vLLM, or from the adapter's count."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.servers import Server
from tests.vllm.conftest import ASYNCHRONOUS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def weights(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of three policies: the one that engines start with, and two that a trainer made of it."""
    import torch
    from transformers import LlamaForCausalLM

    paths = [tiny_model]
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * parameter.std(correction=0) * torch.randn_like(parameter)
        paths.append(str(tmp_path_factory.mktemp("weights")))
        model.save_pretrained(paths[-1])
        shutil.copy(f"{tiny_model}/tokenizer.json", paths[-1])
    return paths


def push(rollouts: Any, path: Any, version: Any = None, running: Any = False) -> None:
    """What a trainer does after an update, with vLLM's own names."""
    rollouts.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    assert rollouts.llm.reset_prefix_cache(reset_running_requests=running)
    if version is not None:
        name(rollouts, version)


def name(rollouts: Any, version: Any) -> None:
    if not hasattr(rollouts.llm, "update_weight_version"):
        pytest.skip("this vLLM has no weight versions of its own")
    rollouts.llm.update_weight_version(version)


@pytest.fixture
def kept(shared_server: Server, make_client: MakeClient) -> Callable[..., Any]:
    """kept(prompts) -> for every prompt what is stored, as (epoch, tokens) in the order of the epochs."""
    client = make_client(shared_server.endpoint)

    def read(prompts: Prompts) -> Any:
        return [sorted((r.epoch or 0, list(r.tokens)) for r in client.history(prompt)) for prompt in prompts]

    return read


def epochs(histories: Any) -> Any:
    return [[epoch for epoch, _ in history] for history in histories]


def test_vllm_says_the_version(
    engine: StartEngine, shared_server: Server, prompts: Prompts, weights: Any, kept: Callable[..., Any]
) -> None:
    rollouts = engine(shared_server.endpoint)
    written = []
    for version, path in zip(("step3", "step4", "step6"), weights, strict=True):
        push(rollouts, path, version)
        written.append(rollouts.generate(prompts))
    assert written[0] != written[1] != written[2]
    by_prompt = [[group[0] for group in visits] for visits in zip(*written, strict=True)]
    assert kept(prompts) == [list(zip((3, 4, 6), texts, strict=True)) for texts in by_prompt]


def test_the_request_knows_better(
    engine: StartEngine, shared_server: Server, prompts: Prompts, weights: Any, kept: Callable[..., Any]
) -> None:
    rollouts = engine(shared_server.endpoint)
    push(rollouts, weights[1], "step3")
    rollouts.generate(prompts, extra_args={"histospec": {"epoch": 2}})
    assert epochs(kept(prompts)) == [[2]] * len(prompts)


def test_nobody_says_anything(
    engine: StartEngine, shared_server: Server, prompts: Prompts, weights: Any, kept: Callable[..., Any]
) -> None:
    """New weights are known by the prefix cache, which is emptied; twice in a row, for sleep and for the update."""
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts)
    for path in weights[1:]:
        assert rollouts.llm.reset_prefix_cache()
        push(rollouts, path)
        for _ in range(2):
            rollouts.generate(prompts)
    assert epochs(kept(prompts)) == [[0, 1, 1, 2, 2]] * len(prompts)


def test_versions_without_a_number_are_counted(
    engine: StartEngine, shared_server: Server, prompts: Prompts, weights: Any, kept: Callable[..., Any]
) -> None:
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts)
    for version, path in zip(("9f86d08", "60303ae"), weights[1:], strict=True):
        push(rollouts, path, version)
        name(rollouts, version)
        rollouts.generate(prompts)
    assert epochs(kept(prompts)) == [[0, 1, 2]] * len(prompts)


def test_engines_of_one_run_agree(
    engine: StartEngine, shared_server: Server, prompts: Prompts, weights: Any, kept: Callable[..., Any]
) -> None:
    """One that starts later is as far as the others, before it is told anything and after."""
    first = engine(shared_server.endpoint)
    push(first, weights[1], "step5")
    first.generate(prompts[:2])
    second = engine(shared_server.endpoint)
    second.generate(prompts[2:4])
    for rollouts, some in ((second, prompts[4:6]), (first, prompts[6:8])):
        push(rollouts, weights[2], "step6")
        rollouts.generate(some)
    assert epochs(kept(prompts[:8])) == [[5]] * 4 + [[6]] * 4


@pytest.mark.parametrize("named", [True, False], ids=["named", "counted"])
def test_weights_change_in_the_middle(
    engine: StartEngine, shared_server: Server, prompts: Prompts, weights: Any, kept: Callable[..., Any], named: bool
) -> None:
    """
    1. A visit under the old weights, and half of another one: some responses end, the others are running.
    2. New weights: the running requests are thrown out of the cache and go on where they were.
    3. Their first parts are the old policy's and their ends the new one's. Each is kept once, as the new one's, and the
       others as the old one's. Later requests have drafts.
    """
    plain, rollouts = engine(), engine(shared_server.endpoint)  # vLLM counts for the engine that started last
    if named:
        name(rollouts, "step1")
    old, new = (1, 2) if named else (0, 1)
    first = rollouts.generate(prompts)
    assert plain.generate(prompts) == first
    rollouts.start(prompts, stop_token_ids=sorted({group[0][4] for group in first[:2]}))
    done = rollouts.step(3 + ASYNCHRONOUS)  # an asynchronous engine returns a step one step later
    running = {request.request_id.split("-")[1]: request for request in rollouts.scheduler.running}
    assert done
    assert running
    begun = {int(i): list(request.output_token_ids) for i, request in running.items()}
    push(rollouts, weights[1], "step2" if named else None, running=True)
    responses = rollouts.finish()
    push(plain, weights[1])
    for i, prefix in begun.items():
        [[end]] = plain.generate(
            [prompts[i] + prefix], max_tokens=40 - len(prefix), stop_token_ids=sorted({g[0][4] for g in first[:2]})
        )
        assert responses[i] == [prefix + end]
    ended = {int(output.request_id.split("-")[1]): list(output.outputs[0].token_ids) for output in done}
    texts = ended | {i: responses[i][0] for i in begun}
    assert texts.keys() == set(range(len(prompts)))
    for i, history in enumerate(kept(prompts)):
        assert history == sorted([(old, first[i][0]), (new if i in begun else old, texts[i])])
    accepted = rollouts.counter("spec_decode_num_accepted_tokens")
    assert rollouts.generate(prompts) == plain.generate(prompts)
    assert rollouts.counter("spec_decode_num_accepted_tokens") > accepted


def test_a_vllm_without_weight_versions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    from vllm.v1.engine.core import EngineCore

    from histospec.client.vllm.patches.weight_versions import install

    monkeypatch.delattr(EngineCore, "set_weight_version", raising=False)
    install()
    assert not hasattr(EngineCore, "set_weight_version")
