"""The plug-in that vLLM loads in each of its processes (entry point vllm.general_plugins).

It prepares the workers of engines with HistoSpec's scheduler or proposer. vLLM loads it before it creates the worker,
and the engine's scheduler is known only then.
"""

import functools
import importlib
import logging
import os
from typing import Any

from histospec.client.engines.environment import enabled
from histospec.client.vllm import logs, settings
from histospec.client.vllm.config import AdapterConfig, samples_coupled
from histospec.client.vllm.patches import choosing, cpu, drafter, enabling, undrafted
from histospec.client.vllm.patches.replacing import is_replaced, replace

logger = logging.getLogger("histospec.vllm")


def register() -> None:
    """Prepares the workers of engines that draft with HistoSpec, and installs what the environment switches on.

    Raises:
        ValueError: HISTOSPEC_ENABLE or HISTOSPEC_SAMPLING is invalid.
        RuntimeError: this vLLM does not fit one of them. A run without it would not show that it is missing.
    """
    install()
    if enabled():
        enabling.install()
    if samples_coupled():
        logs.join_vllm()
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V2 gives the server no alternatives
        from histospec.client.vllm.patches import sampling

        sampling.install()


def install() -> None:
    """Prepares every worker of this process when it is created, at most once per process.

    vLLM also loads the plug-in for engines without HistoSpec; their workers stay unchanged.
    """
    try:
        worker: Any = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    except (ImportError, AttributeError):
        logger.warning("HistoSpec: this vLLM has no WorkerBase; its workers stay unchanged")
        return
    choosing.install()
    if not is_replaced(worker, "__init__"):
        replace(worker, "__init__", preparing(worker.__init__))


def preparing(make: Any) -> Any:
    """Returns `WorkerBase.__init__` that first checks the settings and installs the workers' patches."""

    @functools.wraps(make)
    def prepare(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if drafts_here(vllm_config):
            settings.check(vllm_config)  # fails before the model is loaded
            logs.join_vllm()
            if settings.runs_v2(vllm_config):
                from histospec.client.vllm.patches import runner_v2

                runner_v2.install()
                if samples_coupled():
                    from histospec.client.vllm.patches import sampling_v2

                    sampling_v2.install()
            else:
                _install_for_v1(vllm_config)
        make(self, vllm_config, *args, **kwargs)

    return prepare


def _install_for_v1(vllm_config: Any) -> None:
    if AdapterConfig.from_environment().cpu_fix:
        cpu.install()
    undrafted.install()
    if vllm_config.speculative_config.method != "custom_class":
        drafter.install()


def drafts_here(vllm_config: Any) -> bool:
    """Returns whether an engine has HistoSpecScheduler, a subclass of it, or HistoSpecProposer."""
    return settings.proposes(vllm_config) or settings.is_our_scheduler(vllm_config.scheduler_config.scheduler_cls)
