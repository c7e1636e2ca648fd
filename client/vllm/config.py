"""What the adapter reads from the environment, beside the client's own settings; nothing else here does."""

import math
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of the vLLM adapter.

    Attributes:
        verify_cost: marginal cost of verifying one drafted token, in units of a plain decoding step. Higher drafts
            shorter; 0 drafts as long as it can. None: learned from the time that steps take (see cost.py).
            HISTOSPEC_VERIFY_COST, a number or "auto".
        cpu_fix: whether workers on CPU replace vLLM's wrong expansion of sampling parameters (see cpu.py). Off only
            to show that it is needed. HISTOSPEC_VLLM_CPU_FIX.
    """

    verify_cost: float | None = None
    cpu_fix: bool = True

    @classmethod
    def from_environment(cls) -> "AdapterConfig":
        """Raises ValueError, naming the variable, when a value cannot be used."""
        return cls(
            verify_cost=_cost("HISTOSPEC_VERIFY_COST", cls.verify_cost),
            cpu_fix=_switch("HISTOSPEC_VLLM_CPU_FIX", cls.cpu_fix),
        )


def _cost(name: str, default: float | None) -> float | None:
    text = os.environ.get(name, "")
    if not text:
        return default
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < math.inf):
        raise ValueError(f"{name}: expected 'auto' or a number of at least 0, such as 0.05, got {text!r}")
    return value


def _switch(name: str, default: bool) -> bool:
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {text!r}")
    return default if not text else text == "1"
