"""verl's MTP settings together with HistoSpec's: they give one `speculative_config`, and vLLM starts."""

import argparse
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from histospec.client import Response
from tests.support.servers import Server
from tests.support.verl_batches import LETTERS, batch, rolled_out

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


def test_a_draft_model_is_loaded_with_its_own_weights(
    arguments: Callable[..., argparse.Namespace], mtp_lines: list[str], tiny_model: str
) -> None:
    """As the page says; verl starts vLLM with dummy weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    drafter = f"{{model: {tiny_model}, draft_load_config: {{load_format: auto}}}}"
    told = arguments(
        *mtp_lines,
        "actor_rollout_ref.model.mtp.method=draft_model",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={drafter}",
        "actor_rollout_ref.rollout.load_format=dummy",
    )
    config = AsyncEngineArgs.from_cli_args(told).create_engine_config()
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("draft_model", 16)
    assert config.speculative_config.draft_model_config.model == tiny_model
    assert config.load_config.load_format == "dummy"
    assert config.speculative_config.draft_load_config.load_format == "auto"


def without(lines: list[str], word: str) -> list[str]:
    left = [line for line in lines if word not in line]
    assert len(left) == len(lines) - 1
    return left


@pytest.fixture(scope="module")
def mtp_run(start_run: Callable[..., Any], lines: Callable[..., list[str]], mtp_lines: list[str]) -> Any:
    """A run with both drafters, whose vLLM counts."""
    counting = "actor_rollout_ref.rollout.disable_log_stats=false"
    return start_run(*mtp_lines, *lines("Rewards, logprobs, epochs"), counting)


def test_head_and_history_draft_the_same_text(
    mtp_run: Any, history: Callable[..., list[Response]], shared_server: Server
) -> None:
    drafted = vllm_counter(mtp_run, "vllm:spec_decode_num_draft_tokens_total")
    assert drafted() == 0
    alone = {"temperature": 0.0, "max_tokens": 60, "extra_args": {"histospec": False}}
    prompt = [LETTERS.index(letter) for letter in PROMPT[0]["content"]]
    text = mtp_run.ray.get(mtp_run.server.generate.remote(prompt, alone, "alone")).token_ids
    assert drafted() > 0  # by the head: the server knows nothing of this request

    manager = mtp_run.manager()
    for visit in range(2):
        before = shared_server.total("histospec_accepted_tokens_total")
        rows = list(rolled_out(manager.generate_sequences(batch([PROMPT], validate=True))))  # validation is greedy
        assert [row[0] for row in rows] == [text]
        history(PROMPT, visit + 1)
    assert shared_server.total("histospec_accepted_tokens_total") - before > len(text) / 2


def vllm_counter(run: Any, name: str) -> Callable[[], float]:
    """() -> what the server's vLLM has counted."""
    address, port = run.ray.get(run.server.get_server_address.remote())

    def total() -> float:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return sum(s.value for family in families for s in family.samples if s.name == name)

    return total
