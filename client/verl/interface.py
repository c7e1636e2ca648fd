"""Everything of verl that HistoSpec depends on.

It was checked by running verl 0.9.1. Type checkers see these declarations and need no verl; at run time they are verl's
own classes. The classes of verl's queue are in queued.py, because they need a package that verl may lack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class AgentLoopWorker:
        """Runs the agent loops of some prompts. The class of a Ray actor."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any: ...
        async def _agent_loop_postprocess(self, output: Any, *args: Any, **kwargs: Any) -> Any: ...

    class AgentLoopManager:
        """Distributes a batch over the workers."""

        agent_loop_workers_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def generate_sequences(self, prompts: Any) -> Any:
            """Generates rollouts of a batch."""

    class SingleTurnAgentLoop:
        """An agent loop with one prompt and one response."""

        config: Any
        rollout_config: Any
        tokenizer: Any
        server_manager: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    class Tracking:
        """What all trainers log through."""

        log: Callable[..., None]

    @dataclass
    class TokenOutput:
        """The output of a request to vLLM."""

        token_ids: list[int]
        log_probs: list[float] | None
        stop_reason: str | None
        extra_fields: dict[str, Any]

    copy_to_local: Callable[[str], str]
    get_generation_config: Callable[[str], Any]
    remote: Callable[[type], Any]

else:
    from ray import remote
    from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.utils.fs import copy_to_local
    from verl.utils.model import get_generation_config
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.replica import TokenOutput

__all__ = [
    "AgentLoopManager",
    "AgentLoopWorker",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "Tracking",
    "copy_to_local",
    "get_generation_config",
    "remote",
]
