"""What vLLM calls in each of its processes (entry point vllm.general_plugins)."""

import os

from .. import logs
from ..config import samples_coupled


def register() -> None:
    """Prepares this process as HISTOSPEC_SAMPLING says; does nothing unless it says so.

    Raises ValueError where it cannot tell, RuntimeError where this vLLM does not fit: a run that went on without what
    was asked for would not show it.
    """
    if samples_coupled():
        logs.join_vllm()
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the other model runner has a sampler of its own
        from ..patches import sampling

        sampling.install()
