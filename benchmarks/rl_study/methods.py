"""The methods that the study compares."""

import math
from dataclasses import dataclass, field
from typing import Any

DRAFTED = 16  # most tokens of a draft
FROM_TWIN = 64  # most tokens if the draft may come from a twin
BY_MODEL = 3  # most tokens if a draft model drafts them one by one
SIZES = ("epochs", "problems", "concurrency")
"""What the command line can set of a run's size (`trial.Size`)."""


@dataclass(frozen=True)
class Method:
    """A way to roll a policy out."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of vllm.LLM."""
    drafts: bool = False
    """Whether HistoSpec drafts, with the vLLM arguments of the example."""
    lenience: float | None = None
    """Lenience of SPEC-RL; None samples every response anew."""
    refresh: float | None = None
    """Share of the seeds that coupled sampling renews each epoch; None samples as vLLM does."""
    drafter: int | None = None
    """Most tokens of a draft of the example's draft model; None: it does not draft."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the adapter."""


def _speculative(method: str, **options: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, **options}}


THREE = {"HISTOSPEC_MODEL_DRAFT_TOKENS": str(BY_MODEL)}
LEARNED = {"HISTOSPEC_VERIFY_COST": "auto"}

LENIENCES = {"1": 1.0} | {f"e^{power}": math.exp(power) for power in (0.2, 0.5, 0.8, 1, 2)} | {"inf": math.inf}

METHODS = {
    method.name: method
    for method in (
        Method("none"),
        # vLLM's documentation has these values.
        Method("ngram", _speculative("ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4)),
        Method("suffix", _speculative("suffix", num_speculative_tokens=DRAFTED)),
        Method("HistoSpec", drafts=True),
        Method("HistoSpec auto", drafts=True, environment=LEARNED),
        Method("drafter", drafter=BY_MODEL),
        Method("HistoSpec + drafter", drafts=True, drafter=DRAFTED, environment=THREE),
        Method("HistoSpec + drafter auto", drafts=True, drafter=DRAFTED, environment=LEARNED),
        *(Method(f"SPEC-RL {name}", lenience=lenience) for name, lenience in LENIENCES.items()),
        *(Method(f"coupled {refresh}", drafts=True, refresh=refresh) for refresh in (0, 0.25, 0.5, 0.75, 1)),
        Method("coupled 1 auto", drafts=True, refresh=1, environment=LEARNED),
        *(Method(f"both {name}", drafts=True, lenience=LENIENCES[name]) for name in ("1", "e^0.5")),
    )
}
