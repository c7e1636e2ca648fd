"""HISTOSPEC_ENABLE=1 and nothing else: real vLLM drafts, in whatever way a program starts it.

Each program is a process of its own, which loads the plug-in only as vLLM does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from histospec.client.vllm.settings import PROPOSER, SCHEDULER
from tests.support import apart
from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts
from tests.support.ports import free_port
from tests.support.servers import Server
from tests.vllm.enabled_engine import configured

pytestmark = pytest.mark.vllm

DRAFTS = {"method": "custom_class", "model": PROPOSER, "tokens": 16, "scheduler": SCHEDULER, "asynchronous": False}
OTHER = "vllm.v1.core.sched.scheduler.Scheduler"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def arguments(tiny_model: str) -> dict[str, Any]:
    """vLLM's arguments, without any of HistoSpec."""
    return {
        "model": tiny_model, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "seed": 0,
        "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
    }  # fmt: skip


@pytest.fixture
def variables(namespace: str) -> dict[str, str]:
    """Of every program."""
    return {"HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VERIFY_COST": "0.05"}


@pytest.fixture
def generate(variables: dict[str, str], tmp_path: Path) -> Callable[..., Any]:
    """generate(arguments, prompts, VARIABLE=value) -> what enabled_engine.py wrote, and its log."""

    def ran(*given: Any, **own: str) -> Any:
        program = [sys.executable, str(Path(__file__).parent / "enabled_engine.py"), str(tmp_path / "found")]
        done = subprocess.run(
            [*program, *map(json.dumps, given)], env=os.environ | variables | {"VLLM_LOGGING_LEVEL": "INFO"} | own,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-6000:]
        return json.loads((tmp_path / "found").read_text()), log

    return ran


@pytest.fixture
def configure(variables: dict[str, str]) -> Callable[..., Any]:
    """configure(arguments, ..., VARIABLE=value) -> what `configured` returns in a program that has imported vLLM."""
    return lambda *engines, **own: apart.call(variables | own, configured, engines)


@pytest.mark.parametrize("way", ["own_process", "external_launcher"])
def test_an_engine_drafts(
    generate: Callable[..., Any],
    arguments: dict[str, Any],
    server: Server,
    prompts: Prompts,
    expected: list[Prompts],
    make_client: MakeClient,
    way: str,
) -> None:
    """`external_launcher` is how TRL starts vLLM, in its own process."""
    own = {"HISTOSPEC_ENABLE": "1", "HISTOSPEC_ENDPOINT": server.endpoint, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if way == "external_launcher":
        arguments["distributed_executor_backend"] = way
        own |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found, log = generate(arguments, prompts, **own)
    assert found["settings"] == DRAFTS
    assert found["responses"] == [expected] * 2
    assert found["accepted"] > 0
    client = make_client(server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 2
    assert log.count("HISTOSPEC_ENABLE is 1: speculative_config is {'method': 'custom_class'") == 1


def test_without_the_variable_nothing_changes(
    configure: Callable[..., Any], arguments: dict[str, Any], nowhere: str
) -> None:
    (found,) = configure(arguments, HISTOSPEC_ENDPOINT=nowhere)
    assert (found["settings"]["method"], found["settings"]["scheduler"], found["lines"]) == (None, None, [])


def test_the_users_own_settings_win(configure: Callable[..., Any], arguments: dict[str, Any], nowhere: str) -> None:
    cases: list[tuple[dict[str, Any], tuple[Any, Any, Any], str]] = [
        ({}, ("custom_class", 16, SCHEDULER), "speculative_config is {"),
        ({"speculative_config": NGRAM}, ("ngram", 3, None), f"speculative_config is set and wins: {NGRAM}"),
        ({"scheduler_cls": OTHER}, (None, None, OTHER), f"scheduler_cls is set and wins: {OTHER}"),
        ({"async_scheduling": True}, (None, None, None), "async_scheduling is true"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            (None, None, None),
            "pipeline_parallel_size is more than 1",
        ),
    ]
    given = [arguments | own for own, _, _ in cases]
    found = configure(*given, HISTOSPEC_ENABLE="1", HISTOSPEC_ENDPOINT=nowhere)
    for (_, settings, said), engine in zip(cases, found, strict=True):
        assert tuple(engine["settings"][name] for name in ("method", "tokens", "scheduler")) == settings
        (line,) = engine["lines"]
        assert said in line


def test_a_missing_endpoint_is_said_before_the_model_is_loaded(
    configure: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    (found,) = configure(arguments, HISTOSPEC_ENABLE="1", HISTOSPEC_ENDPOINT="")
    assert found["error"].startswith("HISTOSPEC_ENABLE is 1, but endpoint: ")
    assert found["error"].endswith("or set HISTOSPEC_ENDPOINT")
