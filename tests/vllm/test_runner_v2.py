"""vLLM's own model runner V2 verifies the server's drafts; its kernels run in Triton's interpreter (`make test-v2`).

What a CPU cannot show: the order of streams, CUDA graphs, compiled kernels, speed.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from histospec.client import DraftClient
from tests.support import accepting, any_drafts, host_reads
from tests.support.engines import listening
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.v2]

ALONE = """
import json, sys
from vllm import LLM, SamplingParams
model, prompts, more = json.loads(sys.argv[1])
llm = LLM(model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512,
          max_num_seqs=16, kv_cache_memory_bytes=64 << 20, seed=0, **more)
if more:
    from histospec.client.vllm.patches import runner_v2
    put = runner_v2.put
    def spoil(draft_tokens, *args):
        put(draft_tokens, *args)
        draft_tokens[:, 0] = -1
    runner_v2.put = spoil
core = llm.llm_engine.engine_core.engine_core
kind = type(core.model_executor.driver_worker.worker.model_runner).__module__
sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
for _ in range(2 if more else 1):
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
print(json.dumps([kind, [[list(output.outputs[0].token_ids)] for output in done]]))
"""


def alone(runner: str, arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs an engine with one of vLLM's model runners in a process of its own."""
    variables = {"VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
    command = [sys.executable, "-c", ALONE, json.dumps(arguments)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def runner_of(rollouts: Any) -> Any:
    return rollouts.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def test_greedy_output_is_that_of_v1_and_of_no_speculation(
    engine: Callable[..., Any], shared_server: Server, tiny_model: str, prompts: list[list[int]],
    expected: list[list[list[int]]],
) -> None:  # fmt: skip
    done = alone("0", [tiny_model, prompts, {}])
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["vllm.v1.worker.cpu_model_runner", expected]

    with listening("INFO") as lines:
        rollouts = engine(shared_server.endpoint)
    assert any(line.endswith("model runner V2") for line in lines)
    assert type(runner_of(rollouts)).__module__ == "vllm.v1.worker.cpu.model_runner"
    assert not rollouts.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert rollouts.generate(prompts) == expected  # first visit: wrong drafts and none
    assert rollouts.generate(prompts) == expected  # second: right ones
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 200


@pytest.fixture
def anyhow(engine: Callable[..., Any], nowhere: str, expected: list[list[list[int]]], prompts: list[list[int]]) -> Any:
    """anyhow(...) -> Rollouts with right, wrong, cut, long and missing drafts at random; arguments are vLLM's."""
    texts = [[*prompt, *response[0]] for prompt, response in zip(prompts, expected, strict=True)]

    def start(**arguments: Any) -> Any:
        rollouts = engine(nowhere, **arguments)
        any_drafts.make(rollouts.scheduler, texts)
        return rollouts

    return start


@any_drafts.SCHEDULES
def test_any_draft_leaves_the_output_as_it_is(
    anyhow: Callable[..., Any], prompts: list[list[int]], expected: list[list[list[int]]], arguments: Any
) -> None:
    rollouts = anyhow(**arguments)
    assert rollouts.generate(prompts) == expected
    assert 0 < rollouts.counter("spec_decode_num_accepted_tokens") < rollouts.counter("spec_decode_num_draft_tokens")
    if "num_gpu_blocks_override" in arguments:
        assert rollouts.counter("num_preemptions") > 0


def test_cached_blocks_are_those_without_drafts(
    engine: Callable[..., Any], nowhere: str, prompts: list[list[int]]
) -> None:
    """A second turn begins with blocks that drafts filled in the first one, accepted and rejected."""
    first_turn = [[*range(32), *prompt] for prompt in prompts[:6]]
    plain, rollouts = engine(block_size=32), engine(nowhere, block_size=32)
    written = plain.generate(first_turn)
    second_turn = [[*prompt, *response] for prompt, (response,) in zip(first_turn, written, strict=True)]
    texts = [[*prompt, *response] for prompt, (response,) in zip(second_turn, plain.generate(second_turn), strict=True)]
    any_drafts.make(rollouts.scheduler, texts)
    assert rollouts.generate(first_turn) == written
    before = rollouts.counter("prefix_cache_hits")
    again = rollouts.generate(second_turn)
    assert rollouts.counter("prefix_cache_hits") - before >= 2 * 32 * len(second_turn)
    assert [[*prompt, *response] for prompt, (response,) in zip(second_turn, again, strict=True)] == texts
    assert 0 < rollouts.counter("spec_decode_num_accepted_tokens") < rollouts.counter("spec_decode_num_draft_tokens")


def test_a_sampler_that_accepts_any_token_is_noticed(
    anyhow: Callable[..., Any],
    prompts: list[list[int]],
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A control of the bed: if this were not noticed, the tests above would show nothing."""
    accepting.make(monkeypatch)
    assert anyhow().generate(prompts) != expected


def test_a_place_without_a_token_is_noticed(
    shared_server: Server, namespace: str, tiny_model: str, prompts: list[list[int]], expected: list[list[list[int]]],
    drafts: Any,
) -> None:  # fmt: skip
    """Every scheduled place is an input of the model, so -1 must never get there: it ends the process."""
    variables = {"HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VERIFY_COST": "0.05"}
    variables |= {"HISTOSPEC_ENDPOINT": shared_server.endpoint, "HISTOSPEC_NAMESPACE": namespace}
    done = alone("1", [tiny_model, prompts, drafts], **variables)
    assert done.returncode != 0 or json.loads(done.stdout.splitlines()[-1])[1] != expected


def test_the_host_reads_nothing_from_the_device(
    anyhow: Callable[..., Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each read would wait for the forward pass."""
    from histospec.client.vllm.patches import runner_v2

    reads: list[str] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with host_reads.counted() as found:
                result = function(*args, **named)
            reads.extend(found)
            return result

        return call

    monkeypatch.setattr(runner_v2, "put", watched(runner_v2.put))
    monkeypatch.setattr(runner_v2.NoSpeculator, "propose", watched(runner_v2.NoSpeculator.propose))
    rollouts = anyhow()
    rollouts.generate(prompts)
    assert rollouts.counter("spec_decode_num_draft_tokens") > 0
    assert reads == []


def test_a_read_in_a_hook_is_counted() -> None:
    import torch

    device = torch.zeros(4, 4, dtype=torch.int64)
    with host_reads.counted() as found:
        if device[0, 0] > 0 or device.sum().item() or device.tolist() is None:
            pytest.fail("zeros")
    assert found == ["__bool__", "item", "tolist"]


def test_finished_responses_are_the_history(
    engine: Callable[..., Any], shared_server: Server, make_client: Callable[[str], DraftClient], namespace: str,
    prompts: list[list[int]], expected: list[list[list[int]]],
) -> None:  # fmt: skip
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts)
    client = make_client(shared_server.endpoint)
    for prompt, (response,) in zip(prompts, expected, strict=True):
        (kept,) = client.history(prompt)
        assert list(kept.tokens) == response
