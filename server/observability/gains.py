"""Computes from counters what a run gains from drafts, and what limits the gain."""

from collections.abc import Mapping
from typing import NamedTuple

from histospec.protocol.costs import NOTHING_PAYS, speedup

STEPS = ("drafts_hit", "drafts_empty", "undrafted_tokens")
"""Counters whose sum is the number of steps, one per session and forward pass."""

MODEL_DRAFTED = "model.draft_tokens"
"""Counters of draft tokens. They include the workers' own drafter: verification costs the same, its time is unknown."""

ENOUGH = 20  # sessions or steps; with fewer, no reason is given
MOST = 0.5  # a share from which it counts as the main reason


class Gain(NamedTuple):
    """Ratios; None where the divisor is 0."""

    steps: float
    generated: float
    """Generated tokens per step."""
    tokens_per_step: float | None
    """1 without drafts."""
    speedup: float | None
    """The speed-up by `protocol.costs`; also None if the verify cost is unknown."""
    acceptance: float | None
    """Accepted tokens as a share of the server's draft tokens."""
    empty: float | None
    """Empty drafts as a share of all drafts."""
    undrafted: float | None
    """Steps for which no draft was asked as a share of all steps."""
    known: float | None
    """The cache hit rate: sessions on a problem with history as a share of all sessions."""


def gain(counters: Mapping[str, float], verify_cost: float | None) -> Gain:
    """Returns the gain over a period. `counters`: the engine's counters of that period, by name."""
    steps = sum(counters[name] for name in STEPS)
    drafts = counters["drafts_hit"] + counters["drafts_empty"]
    generated, drafted = counters["generated_tokens"], counters["draft_tokens"]
    verified = drafted + counters[MODEL_DRAFTED]
    return Gain(
        steps,
        generated,
        _ratio(generated, steps),
        None if verify_cost is None or not steps else speedup(generated, steps, verified, verify_cost),
        _ratio(counters["accepted_tokens"], drafted),
        _ratio(counters["drafts_empty"], drafts),
        _ratio(counters["undrafted_tokens"], steps),
        _ratio(counters["lookups_hit"], counters["lookups_hit"] + counters["lookups_miss"]),
    )


def why_not_more(some: Gain, lookups: float, verify_cost: float | None) -> str:
    """Returns the main limit of the gain in words; empty if none stands out or the sample is too small.

    `lookups`: sessions opened in the same period.
    """
    if some.steps < ENOUGH:
        return ""
    if verify_cost is not None and verify_cost >= NOTHING_PAYS:
        return f"verifying a draft token costs {verify_cost:.2f} of a step without drafts, so nothing is drafted"
    if (some.undrafted or 0) >= MOST:
        return f"in {some.undrafted:.0%} of the steps, no draft was asked for, or it came too late"
    if lookups >= ENOUGH and some.known is not None and some.known < MOST:
        return f"{1 - some.known:.0%} of the sessions have a problem without history"
    if (some.empty or 0) >= MOST:
        return f"{some.empty:.0%} of the drafts are empty: no history matches these texts, or a draft would not pay"
    if some.acceptance is not None and some.acceptance < MOST:
        return f"{some.acceptance:.0%} of the draft tokens are accepted: the policy writes other text than before"
    return ""


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
