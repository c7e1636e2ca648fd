"""Learns what drafts cost an engine from the time of its steps, and decides whether to ask for any. Does no I/O.

prices.py fits the price of a step, rates.py holds the mean tokens of recent steps, promise.py says what drafts would
yield, learned.py compares and decides.
"""

from .clock import StepClock
from .learned import FixedCost, LearnedCost
from .prices import DrafterCost
from .promise import Promise, promise_of

__all__ = ["DrafterCost", "FixedCost", "LearnedCost", "Promise", "StepClock", "promise_of"]
