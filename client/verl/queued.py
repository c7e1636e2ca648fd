"""Workers for trainers that take single rollouts out of a TransferQueue as they finish."""

from typing import TYPE_CHECKING, Any

from .interface import remote
from .worker import Remembering

if TYPE_CHECKING:
    from .interface import AgentLoopManager as AgentLoopManagerTQ
    from .interface import AgentLoopWorker as AgentLoopWorkerTQ
else:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ as Actor

    # Ray lets nobody inherit from an actor's class. The class behind it says where it can be found, or its methods
    # would be pickled with a second copy of it, and their super() would fail.
    AgentLoopWorkerTQ = Actor.__ray_actor_class__
    AgentLoopWorkerTQ.__module__ = __name__


class Worker(Remembering, AgentLoopWorkerTQ):
    """An actor's class."""


class Manager(AgentLoopManagerTQ):
    """verl's manager, with these workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = remote(Worker)
