"""The lines of docs/frameworks/verl.md, and the command of the RayJob, in verl's configuration."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.examples import verl_overrides


def test_the_lines_for_drafts_compose(compose: Callable[..., Any], lines: Callable[..., list[str]]) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = compose(*lines("Drafts"))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.engine_kwargs["vllm"]["scheduler_cls"] == "histospec.client.vllm.HistoSpecScheduler"
    assert rollout.engine_kwargs["vllm"]["speculative_config"]["method"] == "custom_class"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.HISTOSPEC_NAMESPACE == "run-1"


def test_the_variables_of_coupled_sampling_compose(
    compose: Callable[..., Any], lines: Callable[..., list[str]]
) -> None:
    drafts = [line for line in lines("Drafts") if "env_vars" not in line]
    variables = compose(*drafts, *lines("Coupled sampling")).ray_kwargs.ray_init.runtime_env.env_vars
    assert variables.HISTOSPEC_SAMPLING == "coupled"
    assert variables.HISTOSPEC_SEED_EVERY == "100"  # text, which is all that Ray takes


def test_the_command_of_the_rayjob_composes(verl: Any) -> None:
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=verl_overrides())
    validate_config(config, use_reference_policy=False, use_critic=False)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]
    assert engine["scheduler_cls"] == "histospec.client.vllm.HistoSpecScheduler"
    assert engine["speculative_config"]["num_speculative_tokens"] == 16


def test_siblings_and_validation_share_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed stays for HISTOSPEC_SEED_EVERY steps; what verl gives stays, too."""
    from histospec.client.verl import coupled

    monkeypatch.setenv("HISTOSPEC_ENDPOINT", "127.0.0.1:9")
    monkeypatch.setenv("HISTOSPEC_NAMESPACE", "run")
    for name, value in (("SAMPLING", "coupled"), ("SEED_REFRESH", "1"), ("SEED_EVERY", "10")):
        monkeypatch.setenv(f"HISTOSPEC_{name}", value)
    coupled._policy.cache_clear()

    def drawn(step: int, sibling: int | None, validate: bool = False, given: int | None = None) -> int | None:
        seed = coupled.draw(given, "problem", {"step": step, "validate": validate}, sibling)
        assert coupled.drawn() == seed
        return seed

    assert drawn(20, 0) == drawn(29, 0) is not None
    assert len({drawn(20, 0), drawn(30, 0), drawn(20, 1), drawn(30, 1)}) == 4
    assert [drawn(20, 0, validate=True), drawn(20, None), drawn(20, 0, given=7)] == [None, None, 7]
    monkeypatch.delenv("HISTOSPEC_SAMPLING")
    coupled._policy.cache_clear()
    assert drawn(20, 0) is None


def test_the_manager_is_for_vllm_alone(compose: Callable[..., Any], settings: list[str]) -> None:
    from verl.utils.import_utils import load_class_from_fqn

    config = compose(*settings, "actor_rollout_ref.rollout.name=sglang")
    manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
    with pytest.raises(ValueError, match=r"rollout\.name: is 'sglang', must be 'vllm'"):
        manager.create(config=config)


@pytest.mark.parametrize(
    ("override", "named"),
    [("temperature=0.5", "temperature: 0.5"), ("top_p=0.9", "top_p: 0.9"), ("calculate_log_probs=false", "log_probs")],
)
def test_reuse_refuses_what_does_not_go_with_it(
    compose: Callable[..., Any], settings: list[str], tiny_model: str, override: str, named: str
) -> None:
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from histospec.client.verl.speculative import SpeculativeAgentLoop

    config = compose(*settings, f"actor_rollout_ref.rollout.{override}")
    with pytest.raises(ValueError, match=named):
        SpeculativeAgentLoop(
            DictConfigWrap(config), server_manager=None, tokenizer=AutoTokenizer.from_pretrained(tiny_model),
            processor=None, dataset_cls=None, data_config=DictConfigWrap(config.data), lenience=1.0,
        )  # fmt: skip


def test_a_problem_is_the_same_in_every_epoch_and_no_other() -> None:
    import numpy as np

    from histospec.client.verl.worker import problem_of

    def picture(value: Any) -> Any:
        return [{"role": "user", "content": [{"type": "image", "image": np.full((2, 2), value)}]}]

    text = [{"role": "user", "content": "a"}]
    assert (
        problem_of(text) == problem_of(np.array(text, dtype=object)) != problem_of([{"role": "user", "content": "b"}])
    )
    assert problem_of(picture(1)) == problem_of(picture(1)) != problem_of(picture(2))
