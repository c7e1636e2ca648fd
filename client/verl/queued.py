"""Workers and manager for verl's trainers that take single rollouts out of a TransferQueue as they finish."""

from typing import TYPE_CHECKING, Any

from histospec.client.verl.interface import remote
from histospec.client.verl.measuring import Measuring
from histospec.client.verl.worker import Remembering

if TYPE_CHECKING:
    from histospec.client.verl.interface import AgentLoopManager as AgentLoopManagerTQ
    from histospec.client.verl.interface import AgentLoopWorker as AgentLoopWorkerTQ
else:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ as Actor

    # Ray does not allow subclasses of an actor's class, so this takes the class behind it. Its __module__ must lead to
    # it: otherwise Ray would pickle its methods with a second copy of the class, and their super() would fail.
    AgentLoopWorkerTQ = Actor.__ray_actor_class__
    AgentLoopWorkerTQ.__module__ = __name__


class Worker(Remembering, AgentLoopWorkerTQ):
    """verl's worker, with the additions of `Remembering`. The class of a Ray actor."""


class Manager(Measuring, AgentLoopManagerTQ):
    """verl's manager with these workers, and the additions of `Measuring`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = remote(Worker)

    def generate_sequences(self, prompts: Any) -> Any:
        """See verl. `prompts`: a TensorDict."""
        self._begins(validation="validate" in prompts and bool(prompts["validate"]))
        return super().generate_sequences(prompts)
