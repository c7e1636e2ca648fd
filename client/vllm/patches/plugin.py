"""What vLLM calls in each of its processes (entry point vllm.general_plugins)."""

import os

from .. import logs
from ..config import samples_coupled
from . import workers


def register() -> None:
    """Has workers prepared whose engine drafts with HistoSpec, and coupled sampling installed if it is asked for.

    Raises ValueError where it cannot tell, RuntimeError where this vLLM does not fit: a run that went on without what
    was asked for would not show it.
    """
    workers.install()
    if samples_coupled():
        logs.join_vllm()
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the other model runner has a sampler of its own
        from . import sampling

        sampling.install()
