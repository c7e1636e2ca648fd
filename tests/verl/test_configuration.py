"""The lines of docs/frameworks/verl.md, in verl's own configuration."""


def test_the_lines_for_drafts_compose(compose, lines):
    from verl.utils.config import omega_conf_to_dataclass

    config = compose(*lines("Drafts"))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.engine_kwargs["vllm"]["scheduler_cls"] == "histospec.client.vllm.HistoSpecScheduler"
    assert rollout.engine_kwargs["vllm"]["speculative_config"]["method"] == "custom_class"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.HISTOSPEC_NAMESPACE == "run-1"
