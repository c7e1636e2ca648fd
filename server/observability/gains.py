"""What drafts gain, from counters: the ratios that answer "is my run helped, how much, why not more?"."""

from collections.abc import Mapping
from typing import NamedTuple

from histospec.protocol.costs import NOTHING_PAYS, speedup

STEPS = ("drafts_hit", "drafts_empty", "undrafted_tokens")
"""Counters whose sum is the number of steps, one a session and forward pass."""

MODEL_DRAFTED = "model.draft_tokens"
"""Counts what the workers' own drafter drafted: verifying it costs as much, and its own time is not known here."""

ENOUGH = 20  # sessions or steps, below which no reason is given
MOST = 0.5  # a share from which on it is the main reason


class Gain(NamedTuple):
    """Ratios are None where there is nothing to divide by."""

    steps: float
    generated: float
    """Tokens."""
    tokens_per_step: float | None
    """1 without drafts."""
    speedup: float | None
    """How many times as fast as without drafts, by `protocol.costs`; None where the verify cost is not known, too."""
    acceptance: float | None
    """Of the tokens that the server drafted."""
    empty: float | None
    """Of the drafts: those without a token."""
    undrafted: float | None
    """Of the steps: those for which no draft was asked."""
    known: float | None
    """Of the sessions: those opened on a problem with history."""


def gain(counters: Mapping[str, float], verify_cost: float | None) -> Gain:
    """Of what was counted in some time. counters: the engine's, by name."""
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
    """The main reason, in plain words; empty where nothing stands out, or too little has happened to tell.

    lookups: sessions opened in the same time.
    """
    if some.steps < ENOUGH:
        return ""
    if verify_cost is not None and verify_cost >= NOTHING_PAYS:
        return f"verifying a drafted token costs {verify_cost:.2f} of a plain step, so nothing is drafted"
    if (some.undrafted or 0) >= MOST:
        return f"no draft was asked for, or it came late, in {some.undrafted:.0%} of the steps"
    if lookups >= ENOUGH and some.known is not None and some.known < MOST:
        return f"{1 - some.known:.0%} of the sessions open on a problem without history"
    if (some.empty or 0) >= MOST:
        return f"{some.empty:.0%} of the drafts are empty: nothing known continues these texts, or it would not pay"
    if some.acceptance is not None and some.acceptance < MOST:
        return f"{some.acceptance:.0%} of the drafted tokens are accepted: the policy writes something else"
    return ""


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
