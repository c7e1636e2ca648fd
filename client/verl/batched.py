"""Workers for trainers that hand over whole batches."""

from typing import Any

from .interface import AgentLoopManager, AgentLoopWorker, remote
from .worker import Remembering


class Worker(Remembering, AgentLoopWorker):
    """An actor's class."""


class Manager(AgentLoopManager):
    """verl's manager, with these workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = remote(Worker)
