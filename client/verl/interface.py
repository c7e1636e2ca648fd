"""What HistoSpec depends on of verl; all of it, and nothing more.

Checked by running verl 0.9.1. Type checkers see these declarations and need no verl; at run time they are verl's own.
The classes of verl's queue are in queued.py: they need a package that not every installation of verl has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class AgentLoopWorker:
        """An actor's class: runs the agent loops of some prompts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any: ...
        async def _agent_loop_postprocess(self, output: Any, *args: Any, **kwargs: Any) -> Any: ...

    class AgentLoopManager:
        """Spreads a batch over the workers."""

        agent_loop_workers_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    class SingleTurnAgentLoop:
        """One prompt, one response."""

        config: Any
        rollout_config: Any
        tokenizer: Any
        server_manager: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @dataclass
    class TokenOutput:
        """What a request to vLLM gave."""

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
    from verl.workers.rollout.replica import TokenOutput

__all__ = [
    "AgentLoopManager",
    "AgentLoopWorker",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "copy_to_local",
    "get_generation_config",
    "remote",
]
