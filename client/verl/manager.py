"""The class for verl's setting `rollout.agent.agent_loop_manager_class`."""

import importlib
from typing import Any


class HistoSpecAgentLoopManager:
    """Creates verl's own manager of agent loops, with workers that store their rollouts in the history.

    verl has two kinds of manager: one for trainers that take whole batches, and one for trainers that take single
    rollouts out of a TransferQueue as they finish (`trainer.use_v1`, the default). Both get the same additions.
    """

    @classmethod
    def create(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of verl's `AgentLoopManager.create`, which has the same parameters.

        Raises:
            ValueError: the rollout engine is not vLLM.
        """
        engine = config.actor_rollout_ref.rollout.name
        if engine != "vllm":
            raise ValueError(f"actor_rollout_ref.rollout.name: is {engine!r}, must be 'vllm'")
        queued = bool(config.transfer_queue.enable)  # verl's trainer sets it before it calls this
        module = importlib.import_module(f"{__package__}.{'queued' if queued else 'batched'}")
        return module.Manager.create(config, *args, **kwargs)
