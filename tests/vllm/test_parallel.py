"""A model on several workers has one scheduler, and therefore one set of sessions."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from histospec.client.vllm import settings
from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.ports import free_port
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.vllm.conftest import RUNNER

pytestmark = pytest.mark.vllm


@pytest.fixture
def begin(tiny_model: str, server: Server, namespace: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """begin(prompts, version, arguments of vLLM, environment) starts parallel_engine.py.

    It returns a function that waits for the process, and returns what that wrote, as a dict.
    """
    script = Path(__file__).with_name("parallel_engine.py")
    usual = {
        "HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_DEADLINE": "5",
        "HISTOSPEC_VERIFY_COST": "0.05", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip
    begun: list[subprocess.Popen[bytes]] = []

    def run(prompts: Prompts, version: str, arguments: dict[str, Any], **environment: str) -> Callable[[], Any]:
        log, result = tmp_path / f"log-{len(begun)}", tmp_path / f"result-{len(begun)}.json"
        command = [sys.executable, str(script), tiny_model, json.dumps(prompts), version, str(result)]
        command.append(json.dumps(arguments))
        with log.open("w") as said:
            process = subprocess.Popen(
                command, env=os.environ | usual | environment, stdout=said, stderr=said, start_new_session=True
            )
        begun.append(process)

        def written() -> Any:
            while process.poll() is None and not any(each.poll() for each in begun):  # the script has a limit of time
                time.sleep(0.1)
            assert process.poll() == 0, "\n".join(each.read_text()[-8000:] for each in tmp_path.glob("log-*"))
            return json.loads(result.read_text())

        return written

    try:
        yield run
    finally:
        for process in begun:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers, too
            process.wait()


@pytest.fixture
def rollout(begin: Callable[..., Any]) -> Callable[..., Any]:
    """rollout(prompts, version, arguments of vLLM, environment) -> what two workers write; see `begin`."""
    return lambda prompts, version, arguments, **environment: begin(
        prompts, version, {"tensor_parallel_size": 2} | arguments, **environment
    )()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("custom_class", marks=[] if RUNNER == "v2" else pytest.mark.long),
        pytest.param("draft_model", marks=[pytest.mark.v1, pytest.mark.long]),
        pytest.param("eagle", marks=[pytest.mark.v1, pytest.mark.long]),
    ],
)
def test_tensor_parallel(
    rollout: Callable[..., Any],
    drafts: dict[str, Any],
    drafter: Callable[..., Any],
    method: str,
    prompts: Prompts,
    expected: list[Prompts],
    server: Server,
    make_client: MakeClient,
) -> None:
    """
    1. Two workers write what one without drafts does, twice; the second time from drafts.
    2. Every response is kept once, as of the version that vLLM was told, whose engine is in a process of its own.
    3. Every worker, in a process of its own, has what belongs into workers.
    """
    own = {} if method == "custom_class" else {"speculative_config": drafter(method)}
    result = rollout(prompts, "step7", drafts | own)
    assert [[[tokens] for tokens in visit] for visit in result["responses"]] == [expected] * 2
    assert result["accepted"] > len(prompts)
    in_workers = {"runner_v2"} if RUNNER == "v2" else {"cpu", "undrafted"}
    in_workers |= set() if method == "custom_class" else {"drafter"}
    assert [set(rooms) - {"choosing", "plugin"} for rooms in result["patched"]] == [in_workers] * 2
    epoch = 7 if result["version"] else 0
    client = make_client(server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert [(r.epoch, list(r.tokens)) for r in client.history(prompt)] == [(epoch, group[0])] * 2


@pytest.mark.v2
def test_a_rank_that_dies(
    rollout: Callable[..., Any], drafts: dict[str, Any], prompts: Prompts, expected: list[Prompts], server: Server,
    make_client: MakeClient,
) -> None:  # fmt: skip
    """
    1. A worker is killed in the middle of a visit: vLLM ends with its own error, and so does the process.
    2. The responses of the visits before are kept, nothing of the visit that ended; no session stays open.
    """
    assert rollout(prompts, "step7", drafts, HISTOSPEC_TEST_KILL="1")["died"] == "EngineDeadError"
    client = make_client(server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2
    eventually(lambda: server.metrics()["histospec_sessions"] == 0)


@(pytest.mark.v2 if RUNNER == "v2" else pytest.mark.long)
def test_data_parallel_ranks(
    begin: Callable[..., Any], engine: StartEngine, mixture: str, drafts: dict[str, Any], prompts: Prompts,
    server: Server, make_client: MakeClient,
) -> None:  # fmt: skip
    """
    1. Two ranks with a mixture of experts, which step together, write what one engine without drafts does, twice.
    2. The first rank has 4 of 12 requests. When they have ended, it runs empty steps while the other rank works.
    3. Both draft, and both have their responses in the one history.
    """
    plain = engine(model=mixture).generate(prompts)
    shares = [prompts[::3], [prompt for i, prompt in enumerate(prompts) if i % 3]]
    groups = [plain[::3], [group for i, group in enumerate(plain) if i % 3]]
    ours = {"model": mixture, "worker_extension_cls": "tests.support.data_parallel.Collectives"}
    together = {
        "VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port()),
        "VLLM_DP_RANK_LOCAL": "0",  # each on the first memory node
    }  # fmt: skip
    ranks = [
        begin(share, "step7", drafts | ours, VLLM_DP_RANK=str(rank), **together) for rank, share in enumerate(shares)
    ]
    client = make_client(server.endpoint)
    for rank, share, expected in zip(ranks, shares, groups, strict=True):
        result = rank()
        assert [[[tokens] for tokens in visit] for visit in result["responses"]] == [expected] * 2
        assert result["accepted"] > len(share)
        for prompt, group in zip(share, expected, strict=True):
            assert texts(client.history(prompt)) == group * 2


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ({}, ""),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is more than 1, for which vLLM has no speculation"),
        ({"distributed_executor_backend": "external_launcher"}, "with a scheduler in every rank"),
        ({"distributed_executor_backend": "external_launcher", "world_size": 1}, ""),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(setting: Any, refused: str) -> None:
    usual = {"pipeline_parallel_size": 1, "world_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        settings.check_parallelism(SimpleNamespace(**usual | setting))
