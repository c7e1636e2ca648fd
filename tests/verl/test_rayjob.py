"""verl takes the command of the RayJob for Kubernetes, all of it."""

from typing import Any

from tests.support.examples import verl_overrides


def test_the_command_of_the_rayjob_composes(verl: Any) -> None:
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=verl_overrides())
    validate_config(config, use_reference_policy=False, use_critic=False)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]
    assert engine["scheduler_cls"] == "histospec.client.vllm.HistoSpecScheduler"
    assert engine["speculative_config"]["num_speculative_tokens"] == 16
