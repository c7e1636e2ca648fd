"""verl's own MTP settings beside our lines: they are one `speculative_config` for vLLM, and it starts."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from histospec.client import Response
from tests.support.servers import Server

HEADING = "Keep the model's MTP head"
PROMPT = [{"role": "user", "content": "abcdefgh"}]


@pytest.fixture(scope="module")
def mtp_lines(lines: Callable[..., list[str]], mtp_model: str) -> list[str]:
    """The lines of the page, for a model that has an MTP layer."""
    return [*lines(HEADING), f"actor_rollout_ref.model.path={mtp_model}"]


def test_the_lines_are_the_arguments_of_vllm(
    arguments: Callable[..., argparse.Namespace], compose: Callable[..., Any], mtp_lines: list[str]
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    told = arguments(*mtp_lines)
    assert told.async_scheduling is False  # vLLM decides by itself where it is not told
    config = AsyncEngineArgs.from_cli_args(told).create_engine_config()
    assert config.speculative_config.method == "mtp"
    assert config.speculative_config.num_speculative_tokens == 16
    assert config.speculative_config.draft_model_config.architectures == ["MiMoMTPModel"]
    assert config.scheduler_config.get_scheduler_cls().__name__ == "HistoSpecScheduler"
    variables = compose(*mtp_lines).ray_kwargs.ray_init.runtime_env.env_vars
    assert variables.VLLM_USE_V2_MODEL_RUNNER == "0"  # text, which is all that Ray takes


def test_each_line_is_needed(arguments: Callable[..., argparse.Namespace], mtp_lines: list[str]) -> None:
    assert arguments(*without(mtp_lines, "async_scheduling")).async_scheduling is None
    assert arguments(*without(mtp_lines, "num_speculative_tokens")).speculative_config["num_speculative_tokens"] == 1
    assert arguments(*without(mtp_lines, "enable_rollout")).speculative_config is None
    assert arguments(*without(mtp_lines, "scheduler_cls")).scheduler_cls is None


def without(lines: list[str], word: str) -> list[str]:
    left = [line for line in lines if word not in line]
    assert len(left) == len(lines) - 1
    return left


def test_both_draft_in_a_rollout(
    start_run: Callable[..., Any],
    lines: Callable[..., list[str]],
    mtp_lines: list[str],
    history: Callable[..., list[Response]],
    shared_server: Server,
) -> None:
    from tests.verl.test_rollouts import batch, rolled_out

    run = start_run(*mtp_lines, *lines("Rewards, logprobs, epochs"))
    manager = run.manager()
    first = list(rolled_out(manager.generate_sequences(batch([PROMPT] * 4, validate=True))))
    history(PROMPT, 4)
    before = {n: v for n, v in shared_server.metrics().items() if "draft" in n or "accept" in n or "model" in n}
    second = list(rolled_out(manager.generate_sequences(batch([PROMPT] * 4, validate=True))))
    print(first); print(second)
    after = {n: v for n, v in shared_server.metrics().items() if "draft" in n or "accept" in n or "model" in n}
    print(before); print(after)
    assert 0
