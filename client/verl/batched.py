"""Workers for trainers that hand over whole batches."""

from typing import TYPE_CHECKING, Any

import ray
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker

from .worker import Remembering

if TYPE_CHECKING:
    AgentLoopManager = AgentLoopWorker = object


class Worker(Remembering, AgentLoopWorker):
    """An actor's class."""


class Manager(AgentLoopManager):
    """verl's manager, with these workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(Worker)
