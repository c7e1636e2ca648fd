"""What drafts cost a worker: verifying a token, in units of a plain decoding step, and waiting for them.

The engine drafts a token while `survival >= verify_cost * speed_up`, roughly. Survival is at most 1, so that no token
pays where `verify_cost * speed_up >= 1`. The speed-up follows what the sessions of a namespace yield; a worker does not
know it and takes the one that the engine starts from.
"""

DEFAULT_VERIFY_COST = 0.05
"""Until a worker has measured its own: drafts are worth trying."""
STARTING_SPEED_UP = 2.2
"""Tokens for the price of a plain step at DEFAULT_VERIFY_COST, as an engine assumes that has not drafted yet:
`Estimator::Yield` of the core."""
HOPELESS_VERIFY_COST = 1 / STARTING_SPEED_UP
"""From this cost on a worker asks for no drafts: the little that could still pay is not worth asking for."""
NOTHING_PAYS = round(HOPELESS_VERIFY_COST, 2)
"""The same as people are told it: in the hint of the server's page, on the dashboard and in docs/verify-cost.md."""

DEFAULT_DEADLINE = 0.02
"""Seconds that a worker waits for the drafts of a step."""


def speedup(generated: float, steps: float, drafted: float, verify_cost: float) -> float:
    """How many times as fast as without drafts: 1 is no gain, less is a loss.

    Args:
        generated: tokens.
        steps: in which sessions generated them, one a session and forward pass; above 0.
        drafted: tokens that these steps verified.
        verify_cost: of one drafted token, in plain steps.
    """
    return generated / (steps + verify_cost * drafted)
