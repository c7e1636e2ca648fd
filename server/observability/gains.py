"""Says in words what limits the gain of a run from drafts."""

from histospec.protocol.costs import NOTHING_PAYS
from histospec.protocol.gains import Gain

ENOUGH = 20  # sessions or steps; with fewer, no reason is given
MOST = 0.5  # a share from which it counts as the main reason


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
