"""vLLM engines in the tests' own process: each is started once and then used by one test after the other.

Loading and warming up a model takes most of a start, and happens once for every configuration. Each test gets an engine
in the state after a start: with a new scheduler, which reads the adapter's environment, the first weights, empty
caches, no requests, and counters at zero.
"""

import contextlib
import functools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from histospec.client import DraftClient

StartEngine = Callable[..., Any]
"""What the fixtures `engine` and `start_engine` are."""
MakeClient = Callable[[str], DraftClient]
"""What the fixture `make_client` is."""
Prompts = list[list[int]]

FIRST_VERSION = "default"  # vLLM's name of weights without a name


@contextlib.contextmanager
def listening(level: str = "WARNING") -> Iterator[list[str]]:
    """Yields what HistoSpec says meanwhile. An engine that ran before may have joined its lines with those of vLLM."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("histospec")
    before = logger.handlers, logger.level
    logger.handlers = [Listener()]
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.handlers = before[0]
        logger.setLevel(before[1])


class Engines:
    """vLLM's LLM objects by their arguments. They stay until the end: ending one spoils what vLLM's others share."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[Any]] = defaultdict(list)

    def borrow(self, **arguments: Any) -> Any:
        """Returns an idle engine with these arguments of vLLM, renewed as if it had just started."""
        idle = self._idle[json.dumps(arguments, sort_keys=True)]
        # vLLM's CPU build reads the weights of experts wrongly the second time, so such an engine serves one test.
        if not idle or idle[-1].llm_engine.vllm_config.model_config.is_moe:
            return self.start(**arguments)
        _renew(idle[-1], arguments)  # if it fails, no test gets this engine
        return idle.pop()

    def start(self, **arguments: Any) -> Any:
        """A new engine, in the tests' process or not."""
        from vllm import LLM, envs

        _remember_arguments()
        envs.disable_envs_cache()  # which an earlier engine filled; this one may be told otherwise
        return LLM(**arguments)

    def give_back(self, llm: Any, **arguments: Any) -> None:
        """Ends what the engine still does, and its scheduler."""
        engine = llm.llm_engine
        core = engine.engine_core.engine_core
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        let_workers_know(llm)
        core.scheduler.shutdown()
        self._idle[json.dumps(arguments, sort_keys=True)].append(llm)

    def close(self) -> None:
        """Ends what all engines share; they end with the process."""
        if self._idle:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def let_workers_know(llm: Any) -> None:
    """Runs an engine in this process until its workers know which requests have ended, as other engines do."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        core.step_fn()


def _remember_arguments() -> None:
    """Lets schedulers know what they were made of, so that another one can be made of the same."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        self.made_of = args, kwargs
        make(self, *args, **kwargs)

    Scheduler.__init__ = remembering


def _renew(llm: Any, arguments: dict[str, Any]) -> None:
    import torch

    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    if hasattr(core, "set_weight_version"):
        core.set_weight_version(FIRST_VERSION)
    args, kwargs = core.scheduler.made_of
    core.scheduler = type(core.scheduler)(*args, **kwargs)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": arguments["model"]})
    engine.logger_manager = type(engine.logger_manager)(vllm_config=engine.vllm_config)  # counts from zero
    torch.manual_seed(arguments["seed"])
