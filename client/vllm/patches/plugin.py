"""The plug-in that vLLM loads in each of its processes (entry point vllm.general_plugins)."""

import os

from histospec.client.vllm import logs
from histospec.client.vllm.config import samples_coupled
from histospec.client.vllm.patches import workers


def register() -> None:
    """Prepares the workers of engines that draft with HistoSpec, and installs coupled sampling if it is switched on.

    Raises:
        ValueError: HISTOSPEC_SAMPLING is invalid.
        RuntimeError: this vLLM does not fit coupled sampling. A run without it would not show that it is missing.
    """
    workers.install()
    if samples_coupled():
        logs.join_vllm()
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V2 has another sampler
        from histospec.client.vllm.patches import sampling

        sampling.install()
