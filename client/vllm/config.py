"""The adapter's settings, in addition to the client's. No other module here reads the environment, except for vLLM's
own.

======================= ===========================================================================
HISTOSPEC_ENABLE        `1` fills in vLLM's `speculative_config` and `scheduler_cls`, unless one of them is set
                        (docs/frameworks/README.md). `0` (default): they are set in vLLM's arguments
HISTOSPEC_DRAFT_TOKENS  the longest draft that HISTOSPEC_ENABLE=1 fills in, `num_speculative_tokens`; default 16
HISTOSPEC_VERIFY_COST   marginal cost of verifying one drafted token, in units of a plain decoding step; drafts are
                        shorter with a higher cost. A number, or `auto` (default): the adapter learns it from the time
                        of steps, and asks for no drafts while they do not pay
HISTOSPEC_MODEL_DRAFT_TOKENS
                        how many tokens the model's own drafter drafts in a step, if the model has one; 0: none. `auto`
                        (default): as many as pay
HISTOSPEC_SAMPLING      `coupled`: requests with a seed use coupled sampling, and other requests get a seed
                        (docs/coupled.md). `vllm` (default): vLLM's own sampling
HISTOSPEC_SEED_REFRESH  share of the seeds that is renewed at each visit of a problem; default 1
HISTOSPEC_SEED_MAX_AGE  visits after which a seed is renewed at the latest; default: no limit
HISTOSPEC_SEED_EVERY    policy versions between two visits of a problem; default 1: versions are epochs
HISTOSPEC_VLLM_CPU_FIX  `0` keeps vLLM's sampling on CPUs, which is wrong with any speculation; only to demonstrate it
======================= ===========================================================================
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from histospec.client import arguments
from histospec.client.config import switch
from histospec.client.engines.environment import DRAFT_TOKENS, draft_tokens, enabled, tokens
from histospec.client.seeds import DEFAULT_REFRESH, SeedPolicy

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of the vLLM adapter.

    Attributes:
        enable: whether vLLM's settings for drafts are filled in (see patches/enabling.py). HISTOSPEC_ENABLE, 0 or 1.
        draft_tokens: the `num_speculative_tokens` that is filled in, at least 1. HISTOSPEC_DRAFT_TOKENS.
        verify_cost: marginal cost of verifying one drafted token, in units of a plain decoding step. Drafts are shorter
            with a higher cost, and as long as possible with 0. None: learned from the time of steps (see choice/).
            HISTOSPEC_VERIFY_COST, a number or "auto".
        model_draft_tokens: how many tokens the model's own drafter drafts in a step, at least 0. None: as many as pay
            (see choice/). HISTOSPEC_MODEL_DRAFT_TOKENS, an integer or "auto".
        seeds: the seeds of sampled requests; None: vLLM's own sampling. HISTOSPEC_SAMPLING, HISTOSPEC_SEED_….
        cpu_fix: whether workers on CPUs replace vLLM's wrong expansion of sampling parameters (see patches/cpu.py). Off
            only to demonstrate the fault. HISTOSPEC_VLLM_CPU_FIX.
    """

    enable: bool = False
    draft_tokens: int = DRAFT_TOKENS
    verify_cost: float | None = None
    model_draft_tokens: int | None = None
    seeds: SeedPolicy | None = None
    cpu_fix: bool = True

    @classmethod
    def from_environment(cls) -> "AdapterConfig":
        """Returns the settings of the environment. Raises ValueError that names the variable if a value is invalid."""
        return cls(
            enable=enabled(),
            draft_tokens=draft_tokens(),
            verify_cost=_cost("HISTOSPEC_VERIFY_COST", cls.verify_cost),
            model_draft_tokens=tokens("HISTOSPEC_MODEL_DRAFT_TOKENS", 0, auto=True),
            seeds=_seeds() if samples_coupled() else None,
            cpu_fix=switch("HISTOSPEC_VLLM_CPU_FIX", default=cls.cpu_fix),
        )


def samples_coupled() -> bool:
    """Returns whether this process uses coupled sampling. Raises ValueError if HISTOSPEC_SAMPLING is invalid."""
    value = os.environ.get("HISTOSPEC_SAMPLING", "")
    if value not in ("", "vllm", "coupled"):
        raise ValueError(f"HISTOSPEC_SAMPLING: expected 'vllm' or 'coupled', got {arguments.shown(value)}")
    return value == "coupled"


def _seeds() -> SeedPolicy:
    refresh = _given("HISTOSPEC_SEED_REFRESH", float)
    max_age, every = _given("HISTOSPEC_SEED_MAX_AGE", int), _given("HISTOSPEC_SEED_EVERY", int)
    try:
        return SeedPolicy(DEFAULT_REFRESH if refresh is None else refresh, max_age, 1 if every is None else every)
    except ValueError as error:
        field, _, limit = str(error).partition(":")
        raise ValueError(f"HISTOSPEC_SEED_{field.upper()}:{limit}") from None


def _given(name: str, kind: Callable[[str], T]) -> T | None:
    text = os.environ.get(name, "")
    try:
        return kind(text) if text else None
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {arguments.shown(text)}") from None


def _cost(name: str, default: float | None) -> float | None:
    text = os.environ.get(name, "")
    if not text:
        return default
    if text == "auto":
        return None
    return _number(name, text, 0, "'auto' or a number of at least 0, such as 0.05")


def _number(name: str, text: str, least: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= arguments.LARGEST:
        raise ValueError(f"{name}: expected {expected}, got {arguments.shown(text)}")
    return value
