"""Workers and manager for verl's trainers that take whole batches."""

from typing import Any

from .interface import AgentLoopManager, AgentLoopWorker, remote
from .worker import Remembering


class Worker(Remembering, AgentLoopWorker):
    """verl's worker, with the additions of `Remembering`. The class of a Ray actor."""


class Manager(AgentLoopManager):
    """verl's manager with these workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = remote(Worker)
