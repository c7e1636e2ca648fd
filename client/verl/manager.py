"""What a verl run names in `rollout.agent.agent_loop_manager_class`."""

import importlib
from typing import Any


class HistoSpecAgentLoopManager:
    """Makes verl's own manager of agent loops, with workers that bring what they roll out to the history.

    verl has two managers: its trainers hand over whole batches, or take single rollouts out of a TransferQueue as they
    finish (`trainer.use_v1`, the default). Their workers differ, what is added is the same.
    """

    @classmethod
    def create(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """-> what verl's `AgentLoopManager.create` returns, which takes the same arguments.

        Raises:
            ValueError: the rollout engine is not vLLM.
        """
        engine = config.actor_rollout_ref.rollout.name
        if engine != "vllm":
            raise ValueError(f"actor_rollout_ref.rollout.name: HistoSpec drafts for vllm, not for {engine!r}")
        queued = bool(config.transfer_queue.enable)  # verl's trainer sets it before it comes here
        module = importlib.import_module(f"{__package__}.{'queued' if queued else 'batched'}")
        return module.Manager.create(config, *args, **kwargs)
