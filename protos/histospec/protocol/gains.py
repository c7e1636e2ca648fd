"""Computes from the counters of a namespace what a run gains from drafts: the server shows it, and trainers log it."""

from collections.abc import Mapping
from typing import NamedTuple

STEPS = ("drafts_hit", "drafts_empty", "undrafted_tokens")
"""Counters whose sum is the number of steps, one per session and forward pass."""

VERIFIED = "verify_microsteps"
"""What verifying draft tokens cost, each step at its verify cost, in millionths of a step without drafts.

It includes tokens of the workers' own drafter, and not its time, which is unknown.
"""


class Gain(NamedTuple):
    """Ratios; None where the divisor is 0."""

    steps: float
    generated: float
    """Generated tokens."""
    tokens_per_step: float | None
    """Generated tokens per step: 1 without drafts."""
    speedup: float | None
    """How many times as fast decoding was as without drafts; also None if the counters lack VERIFIED."""
    acceptance: float | None
    """Accepted tokens as a share of the server's draft tokens."""
    empty: float | None
    """Empty drafts as a share of all drafts."""
    undrafted: float | None
    """Steps for which no draft was asked as a share of all steps."""
    known: float | None
    """The cache hit rate: sessions on a problem with history as a share of all sessions."""


def gain(counters: Mapping[str, float]) -> Gain:
    """Returns the gain over a period. `counters`: the engine's counters of that period, by name."""
    steps = sum(counters[name] for name in STEPS)
    drafts = counters["drafts_hit"] + counters["drafts_empty"]
    generated, drafted = counters["generated_tokens"], counters["draft_tokens"]
    verified = counters.get(VERIFIED)
    return Gain(
        steps,
        generated,
        _ratio(generated, steps),
        None if verified is None else _ratio(generated, steps + verified / 1e6),
        _ratio(counters["accepted_tokens"], drafted),
        _ratio(counters["drafts_empty"], drafts),
        _ratio(counters["undrafted_tokens"], steps),
        _ratio(counters["lookups_hit"], counters["lookups_hit"] + counters["lookups_miss"]),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
