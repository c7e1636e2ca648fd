"""vLLM's ways to run: the engine in a process of its own, and behind HTTP."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.ports import free_port
from tests.support.servers import Server
from tests.support.waiting import ENGINE_SECONDS

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


@pytest.mark.long  # `test_enabling` has such an engine, too
def test_the_engine_in_a_process_of_its_own(
    engine: StartEngine, server: Server, prompts: Prompts, expected: list[Prompts], make_client: MakeClient
) -> None:
    rollouts = engine(server.endpoint, in_process=False)
    assert rollouts.scheduler is None  # it is elsewhere
    for _ in range(2):
        assert rollouts.generate(prompts) == expected
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 0
    rollouts.close()  # the last commits are out by now
    client = make_client(server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafters_without_a_model(
    engine: StartEngine,
    drafter: Callable[..., Any],
    server: Server,
    nowhere: str,
    prompts: Prompts,
    make_client: MakeClient,
    method: str,
) -> None:
    """In a process of their own: no other engine of vLLM's starts beside what `ngram` imports."""
    if method == "suffix":
        pytest.importorskip("arctic_inference", reason="vLLM's suffix decoding needs arctic-inference")
    expected = engine().generate(prompts, max_tokens=200)
    alone = engine(nowhere, in_process=False, speculative_config=drafter(method, 4), async_scheduling=False)
    assert alone.generate(prompts, max_tokens=200) == expected
    assert alone.counter("spec_decode_num_accepted_tokens") > 0
    alone.close()
    both = engine(server.endpoint, in_process=False, speculative_config=drafter(method), async_scheduling=False)
    for _ in range(2):
        assert both.generate(prompts, max_tokens=200) == expected
    assert both.counter("spec_decode_num_accepted_tokens") > 0
    both.close()
    client = make_client(server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2


@pytest.fixture
def api(
    tiny_model: str, server: Server, namespace: str, drafts: dict[str, Any], tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """POST to vLLM's server with drafts: api(path, body) -> the answer; api(path) is a GET."""
    port = free_port()
    # `vllm serve` itself looks for a distribution named vllm, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--speculative-config", json.dumps(drafts["speculative_config"])]
    command += ["--scheduler-cls", drafts["scheduler_cls"]]
    settings = {
        "HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_DEADLINE": "5",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip

    def call(path: Any, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text else None

    with (tmp_path / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
        try:
            for _ in range(int(ENGINE_SECONDS)):
                if process.poll() is not None:
                    break
                try:
                    call("/health")
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(1)
                else:
                    break
            assert process.poll() is None, (tmp_path / "vllm.log").read_text()[-4000:]
            yield call
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.long
def test_over_http(api: Callable[..., Any], server: Server, tiny_model: str, make_client: MakeClient) -> None:
    prompt = [1, 2, 3, 4]
    body = {"model": tiny_model, "prompt": prompt, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    options = [
        {},
        {"histospec.problem": "p", "histospec.epoch": 2},
        {"histospec": json.dumps({"problem": "p"})},
        {"histospec.problem": "p", "histospec.generated": 1, "histospec.commit": 0},
    ]
    answers = [api("/v1/completions", body | {"vllm_xargs": given} if given else body) for given in options]
    written = [answer["choices"][0]["token_ids"] for answer in answers]
    assert written[0] == written[1] == written[2] == written[3]
    assert len(written[0]) == 30
    client = make_client(server.endpoint)
    assert texts(client.history(prompt)) == written[:1]
    assert [(list(r.tokens), r.epoch) for r in client.history(prompt, problem="p")] == [(written[0], 2)] * 2
