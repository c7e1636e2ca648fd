"""Checks vLLM's settings: those that do not work with drafts from a server, and those that vLLM ignores silently."""

import importlib
import logging
import os
from importlib import metadata
from typing import Any

from histospec.client.vllm.config import samples_coupled
from histospec.protocol.limits import DEFAULT_MAX_DRAFT

logger = logging.getLogger("histospec.vllm")

OURS = "histospec.client.vllm"
PROPOSER, SCHEDULER = f"{OURS}.HistoSpecProposer", f"{OURS}.HistoSpecScheduler"
ASYNC_SCHEDULER = f"{OURS}.asynchronous.scheduler.HistoSpecAsyncScheduler"

PROCESSORS = "vllm.logits_processors"
"""Entry points of plug-ins, which vLLM loads only without speculation."""

PLUGIN = "histospec"
"""The name of the entry point that prepares workers, in the group vllm.general_plugins."""

DRAFTERS = "mtp, eagle, eagle3, draft_model, medusa, ngram, suffix"
"""Methods whose own drafts may be combined with the server's."""

EXACT = ("standard", "block")
"""Methods to verify drafts with which the output has the model's own distribution."""

LOSSY = {
    "synthetic": "which accepts drafts at random",
    "fly": "which accepts tokens that the model would not have sampled",
}


def is_our_proposer(model: Any) -> bool:
    """Returns whether the `model` of a speculative configuration is a class of HistoSpec."""
    return str(model).startswith(OURS)


def proposes(vllm_config: Any) -> bool:
    """Returns whether the drafter of a VllmConfig is a class of HistoSpec."""
    speculative = vllm_config.speculative_config
    return speculative is not None and is_our_proposer(speculative.model)


def is_our_scheduler(scheduler: Any) -> bool:
    """Returns whether a `scheduler_cls`, a class or its name, is HistoSpecScheduler or a subclass of it."""
    if isinstance(scheduler, str):
        if scheduler.startswith(OURS):
            return True
        module, _, name = scheduler.rpartition(".")
        scheduler = getattr(importlib.import_module(module), name)
    return any(base.__module__.startswith(OURS) for base in getattr(scheduler, "__mro__", ()))


def check(vllm_config: Any) -> None:
    """Checks that drafts of a server work with a VllmConfig.

    Raises:
        ValueError: they do not; the message names the setting, and says what to set instead.
    """
    check_scheduler(vllm_config)
    check_method(vllm_config.speculative_config)
    check_parallelism(vllm_config.parallel_config)
    check_drafts(vllm_config)
    if runs_v2(vllm_config):
        check_v2(vllm_config.speculative_config)
        if samples_coupled():
            check_noise(vllm_config)
    if vllm_config.scheduler_config.async_scheduling:
        check_asynchronous(vllm_config)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        raise ValueError(f"HistoSpec: VLLM_PLUGINS is {plugins!r}, without {PLUGIN!r}, which prepares workers; add it")


def check_noise(vllm_config: Any) -> None:
    """Checks that model runner V2 samples with the noise that the server foresees.

    Raises:
        ValueError: a setting gives it another one.
    """
    for config, name in (vllm_config, "watermark_config"), (vllm_config.model_config, "use_fp64_gumbel"):
        if getattr(config, name, None):
            raise ValueError(
                f"HistoSpec: HISTOSPEC_SAMPLING is 'coupled', but {name} is set, and it samples with other noise than "
                "the server foresees; leave one of them out"
            )


def check_scheduler(vllm_config: Any) -> None:
    """Checks that a VllmConfig names a scheduler. vLLM's own would verify no draft of the server.

    Raises:
        ValueError: it does not.
    """
    if vllm_config.scheduler_config.scheduler_cls is None:
        raise ValueError(
            "HistoSpec: scheduler_cls is not set, and HistoSpecProposer drafts nothing without HistoSpec's scheduler; "
            f"add --scheduler-cls {SCHEDULER}"
        )


def check_method(speculative: Any) -> None:
    """Checks that drafts of a server work with a SpeculativeConfig of vLLM, or None.

    Raises:
        ValueError: they do not; the message names the setting, and says what to set instead.
    """
    method = None if speculative is None else speculative.method
    if method != "custom_class" and method not in DRAFTERS.split(", "):
        raise ValueError(
            f"HistoSpecScheduler: speculative_config has the method {method!r}; it needs 'custom_class' with the model "
            f"'{PROPOSER}', or a drafter of the model's own: {DRAFTERS}"
        )
    if getattr(speculative, "draft_sample_method", "greedy") != "greedy":
        raise ValueError(
            f"HistoSpec: draft_sample_method is {speculative.draft_sample_method!r}, which needs probabilities that "
            "the server's drafts do not have; set it to 'greedy'"
        )
    verifies = getattr(speculative, "rejection_sample_method", "standard")
    if verifies not in EXACT:
        why = LOSSY.get(verifies, "which HistoSpec does not know")
        raise ValueError(f"HistoSpec: rejection_sample_method is {verifies!r}, {why}; set it to 'standard'")
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        raise ValueError(
            "HistoSpec: num_speculative_tokens_per_batch_size is set, but HistoSpec chooses how many tokens the "
            "model's drafter drafts; leave it out, or see HISTOSPEC_MODEL_DRAFT_TOKENS"
        )


def runs_v2(vllm_config: Any) -> bool:
    """Returns whether vLLM has chosen its model runner V2; releases before 0.22 have none."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def check_v2(speculative: Any) -> None:
    """Checks that vLLM's model runner V2 can verify the drafts of a SpeculativeConfig.

    Raises:
        ValueError: it cannot; the message says what to set instead.
    """
    if speculative.method != "custom_class":
        raise ValueError(
            f"HistoSpec: vLLM has chosen its model runner V2, which keeps the drafts of the method "
            f"{speculative.method!r} on the device, so the server's drafts cannot be compared with them. For both, set "
            f"VLLM_USE_V2_MODEL_RUNNER=0; for the server's alone, set the method 'custom_class' with the model "
            f"'{PROPOSER}'; for the model's own alone, leave out scheduler_cls"
        )
    if getattr(speculative, "enable_adaptive_verification", False):
        raise ValueError(
            "HistoSpec: enable_adaptive_verification is true, but HistoSpec chooses the length of each draft; leave "
            "it out"
        )


def asynchronous(scheduler: Any) -> Any:
    """Returns the `scheduler_cls` for asynchronous scheduling if the argument is HistoSpecScheduler; else it itself."""
    name = scheduler if isinstance(scheduler, str) else f"{scheduler.__module__}.{scheduler.__qualname__}"
    return ASYNC_SCHEDULER if name in (SCHEDULER, f"{OURS}.scheduler.HistoSpecScheduler") else scheduler


def check_asynchronous(vllm_config: Any) -> None:
    """Checks that drafts work with asynchronous scheduling.

    Raises:
        ValueError: they do not; the message names the setting, and says what to set instead.
    """
    if not runs_v2(vllm_config):
        raise ValueError(
            "HistoSpec: async_scheduling is on, where vLLM schedules before the drafts are known. Only vLLM's model "
            "runner V2 takes drafts later, and vLLM has chosen V1; set it to false (--no-async-scheduling)"
        )
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler != ASYNC_SCHEDULER:
        raise ValueError(
            f"HistoSpec: async_scheduling is on, but scheduler_cls is {scheduler!r}, which schedules synchronously; "
            f"set it to '{SCHEDULER}', or async_scheduling to false (--no-async-scheduling)"
        )
    ranks = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    if ranks > 1:
        raise ValueError(
            f"HistoSpec: async_scheduling is on and prefill_context_parallel_size is {ranks}; the ranks of a prompt "
            "would get different drafts. Set async_scheduling to false (--no-async-scheduling)"
        )


def check_drafts(vllm_config: Any) -> None:
    """Checks the longest draft against the limits of vLLM and of the client.

    Raises:
        ValueError: num_speculative_tokens is too large.
    """
    max_tokens, limit, whose = vllm_config.speculative_config.num_speculative_tokens, DEFAULT_MAX_DRAFT, "HistoSpec"
    if not runs_v2(vllm_config):  # a longer draft crashes V1
        verified = importlib.import_module("vllm.v1.sample.rejection_sampler").MAX_SPEC_LEN
        limit, whose = min((limit, whose), (verified, "vLLM"))
    if max_tokens > limit:
        raise ValueError(
            f"HistoSpec: num_speculative_tokens is {max_tokens}; must be at most {limit}: the limit of {whose}"
        )


def warn_of_processors() -> None:
    """Warns of the plug-ins' logits processors that vLLM ignores. It refuses processors given by name itself."""
    if names := sorted(point.name for point in metadata.entry_points(group=PROCESSORS)):
        logger.warning(
            "HistoSpec: with speculation of any kind vLLM does not load logits processors of plug-ins, here %s",
            ", ".join(names),
        )


def check_parallelism(config: Any) -> None:
    """Checks that drafts work with vLLM's `parallel_config`. docs/parallelism.md says what works.

    Raises:
        ValueError: they do not; the message names the setting.
    """
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            "HistoSpec: pipeline_parallel_size is more than 1, for which vLLM has no speculation of any kind "
            "(vllm-project/vllm issue 30436); leave out speculative_config and scheduler_cls"
        )
    if config.distributed_executor_backend == "external_launcher" and config.world_size > 1:
        raise ValueError(
            "HistoSpec: distributed_executor_backend is 'external_launcher', with a scheduler in every rank; drafts "
            "from a server could differ between the ranks of a model. Use 'mp' or 'ray'"
        )


def computes_here(config: Any) -> bool:
    """Returns whether the model runs in the scheduler's process, on a CPU. `config`: vLLM's `parallel_config`."""
    here: bool = config.distributed_executor_backend == "uni"
    return here and bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
