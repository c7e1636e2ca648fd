"""What vLLM calls in each of its processes (entry point vllm.general_plugins)."""

import os

VARIABLE = "HISTOSPEC_SAMPLING"


def coupled() -> bool:
    """Whether this process is to sample coupled. Raises ValueError, naming the variable, when it cannot tell."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "vllm", "coupled"):
        raise ValueError(f"{VARIABLE}: expected 'vllm' or 'coupled', got {value!r}")
    return value == "coupled"


def register() -> None:
    """Prepares this process as the environment says; does nothing otherwise."""
    if not coupled():
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the other model runner has a sampler of its own
    from . import sampler

    sampler.install()
