"""What drafts cost an engine, learned from the time that its steps take, and whether to ask for any. Does no I/O.

prices.py fits the price of a step, rates.py compares the tokens per time with drafts and without, learned.py decides.
"""

from .clock import StepClock
from .learned import FixedCost, LearnedCost
from .prices import DrafterCost

__all__ = ["DrafterCost", "FixedCost", "LearnedCost", "StepClock"]
