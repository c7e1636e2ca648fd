"""The costs of drafts for a worker: verifying a token, in decoding steps without drafts, and waiting for drafts.

Roughly, the engine drafts a token while `survival >= verify_cost * speed_up`. Survival is at most 1, so no token pays
if `verify_cost * speed_up >= 1`. The speed-up follows the yield of the namespace's sessions. A worker does not know it,
and uses the value with which the engine starts.
"""

DEFAULT_VERIFY_COST = 0.05
"""The cost until a worker has measured its own: low enough to try drafts."""
STARTING_SPEED_UP = 2.2
"""The speed-up that an engine assumes at DEFAULT_VERIFY_COST before it has drafted: `Estimator::Yield` of the core."""
HOPELESS_VERIFY_COST = 1 / STARTING_SPEED_UP
"""From this cost on, a worker asks for no drafts: the few that could still pay are not worth the request."""
NOTHING_PAYS = round(HOPELESS_VERIFY_COST, 2)
"""The same value in texts: in the hint of the status page, on the dashboard and in docs/verify-cost.md."""

DEFAULT_DEADLINE = 0.02
"""Seconds that a worker waits for the drafts of a step."""


def speedup(generated: float, steps: float, drafted: float, verify_cost: float) -> float:
    """Returns the speed-up over decoding without drafts: 1 is no gain, less is a loss.

    Args:
        generated: generated tokens.
        steps: steps that generated them, one per session and forward pass; above 0.
        drafted: draft tokens that these steps verified.
        verify_cost: cost of verifying one draft token, in steps without drafts.
    """
    return generated / (steps + verify_cost * drafted)
