"""With HISTOSPEC_ENABLE=1, fills in vLLM's settings for drafts, whatever program makes vLLM's arguments.

vLLM makes the configuration of every engine in `EngineArgs.create_engine_config`: for `LLM`, `AsyncLLM`, `vllm serve`
and trainers. That method calls `create_speculative_config` when it knows the model and the parallelism, and reads
`scheduler_cls` and `async_scheduling` after it. EngineArgs loads plug-ins when one is made, so before the call.

Settings that the user or the trainer made win, and a log line says so. The same holds for settings that do not go with
drafts: the engine starts without drafts, because one of several models of a run, such as a reward model, must not end
the run.
"""

import functools
import importlib
import logging
from typing import Any, NamedTuple

from histospec.client.engines import environment
from histospec.client.vllm import logs, settings
from histospec.client.vllm.config import AdapterConfig
from histospec.client.vllm.patches.replacing import attach, is_replaced, parameters, replace

logger = logging.getLogger("histospec.vllm")

NAME = "create_speculative_config"
KNOWN = ["self", "target_model_config", "target_parallel_config"]


def install() -> None:
    """Makes EngineArgs fill in the settings for drafts, at most once per process.

    Raises:
        RuntimeError: this vLLM makes its configuration in another way.
    """
    engine_args: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    create = getattr(engine_args, NAME, None)
    if create is None or parameters(create)[: len(KNOWN)] != KNOWN:
        raise RuntimeError(
            "HistoSpec: HISTOSPEC_ENABLE is 1, but this vLLM makes its configuration in another way than HistoSpec "
            "knows; unset it, and set speculative_config and scheduler_cls"
        )
    if is_replaced(engine_args, NAME):
        return

    @functools.wraps(create)
    def fill_in_and_create(
        self: Any, target_model_config: Any, target_parallel_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        logs.join_vllm()
        fill_in(self, target_model_config, target_parallel_config)
        return create(self, target_model_config, target_parallel_config, *args, **kwargs)

    replace(engine_args, NAME, fill_in_and_create)


def fill_in(engine_args: Any, model_config: Any, parallel_config: Any) -> None:
    """Sets `speculative_config` and `scheduler_cls` of EngineArgs, unless one of them is set to a class of others.

    Raises:
        ConfigurationError: see `environment.may_fill_in`.
    """
    speculative, scheduler = _speculative(engine_args), engine_args.scheduler_cls
    ours = scheduler is not None and settings.is_our_scheduler(scheduler)
    if ours and speculative:
        return  # all is set, perhaps with the model's own drafter
    obstacle = None
    if scheduler is not None and not ours:
        obstacle = _wins("scheduler_cls", scheduler)
    elif speculative and not settings.is_our_proposer(speculative.get("model")):
        obstacle = _wins("speculative_config", speculative)
    elif not (speculative or ours):
        obstacle = _obstacle(engine_args, model_config, parallel_config)
    if not environment.may_fill_in(obstacle, logger):
        return
    if not speculative:
        tokens = _tokens(engine_args)
        speculative = {"method": "custom_class", "model": settings.PROPOSER, "num_speculative_tokens": tokens}
        attach(engine_args, "speculative_config", speculative)
    scheduler = scheduler or settings.SCHEDULER
    attach(engine_args, "scheduler_cls", scheduler)
    logger.info(
        "HistoSpec: HISTOSPEC_ENABLE is 1: speculative_config is %s, scheduler_cls is %s",
        speculative, scheduler,
    )  # fmt: skip


def _speculative(engine_args: Any) -> dict[str, Any]:
    """Returns what the user set of `speculative_config`, also by vLLM's flags for parts of it."""
    flags = {name: getattr(engine_args, f"spec_{name}", None) for name in ("method", "model", "tokens")}
    return {name: value for name, value in flags.items() if value is not None} | (engine_args.speculative_config or {})


class _Limit(NamedTuple):
    """How many tokens a draft may have, because vLLM refuses to start with more, and which setting it is."""

    tokens: int
    why: str


def _limits(engine_args: Any) -> list[_Limit]:
    limits = []
    if getattr(engine_args, "enable_lora", None):
        requests, batch = engine_args.max_num_seqs, engine_args.max_num_batched_tokens
        why = "enable_lora is true, where vLLM wants max_num_batched_tokens for max_num_seqs whole drafts; set both"
        limits.append(_Limit(batch // requests - 1 if requests and batch else 0, why))
    largest = _compilation(engine_args, "max_cudagraph_capture_size")
    if sizes := _compilation(engine_args, "cudagraph_capture_sizes"):
        largest = max(sizes)
    if largest:  # a step of one request with a whole draft must fit the largest graph
        limits.append(_Limit(largest - 1, f"the largest of cudagraph_capture_sizes is {largest}; add larger ones"))
    return limits


def _compilation(engine_args: Any, name: str) -> Any:
    """Returns a setting of EngineArgs that may also be in its `compilation_config`; None if it is not set."""
    whole = getattr(engine_args, "compilation_config", None)
    within = whole.get(name) if isinstance(whole, dict) else getattr(whole, name, None)
    return getattr(engine_args, name, None) or within


def _tokens(engine_args: Any) -> int:
    """Returns how many tokens a draft may have, and says why they are fewer than HISTOSPEC_DRAFT_TOKENS."""
    wanted = AdapterConfig.from_environment().draft_tokens
    for limit in _limits(engine_args):
        if limit.tokens < wanted:
            logger.warning("HistoSpec: drafts of up to %d tokens, not %d: %s", limit.tokens, wanted, limit.why)
            wanted = limit.tokens
    return wanted


def _wins(name: str, value: Any) -> str:
    return (
        f"{name} is set and wins: {value}. Leave it out, or set both speculative_config and scheduler_cls "
        "(docs/frameworks/README.md)"
    )


def _obstacle(engine_args: Any, model_config: Any, parallel_config: Any) -> str | None:
    """Returns which setting does not go with drafts; None if all do."""
    if model_config.runner_type != "generate":
        return f"its model does not generate text, but is for {model_config.runner_type}"
    if engine_args.async_scheduling:
        return "async_scheduling is true, where vLLM schedules before the drafts are known"
    if engine_args.logits_processors:
        return "logits_processors are set, which vLLM refuses with speculation of any kind"
    try:
        settings.check_parallelism(parallel_config)
    except ValueError as error:
        return str(error).removeprefix("HistoSpec: ")
    return next((limit.why for limit in _limits(engine_args) if limit.tokens < 1), None)
