"""Workers and manager for verl's trainers that take whole batches."""

from typing import Any

from histospec.client.verl.interface import AgentLoopManager, AgentLoopWorker, remote
from histospec.client.verl.measuring import Measuring
from histospec.client.verl.worker import Remembering


class Worker(Remembering, AgentLoopWorker):
    """verl's worker, with the additions of `Remembering`. The class of a Ray actor."""


class Manager(Measuring, AgentLoopManager):
    """verl's manager with these workers, and the additions of `Measuring`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = remote(Worker)

    def generate_sequences(self, prompts: Any) -> Any:
        """See verl. `prompts`: a DataProto."""
        self._begins(validation=bool(prompts.meta_info.get("validate", False)))
        return super().generate_sequences(prompts)
