"""Learns what drafts cost an engine from the time of its steps, and decides whether to ask for any. Does no I/O.

prices.py fits the price of a step, rates.py holds the mean tokens of recent steps, promise.py says what drafts would
yield, learned.py compares and decides; fixed.py does neither.
"""

from histospec.client.vllm.choice.clock import StepClock
from histospec.client.vllm.choice.fixed import FixedCost
from histospec.client.vllm.choice.learned import LearnedCost
from histospec.client.vllm.choice.prices import StepPrices, looks_of
from histospec.client.vllm.choice.promise import Promise, promise_of
from histospec.client.vllm.choice.rates import Rate

__all__ = ["FixedCost", "LearnedCost", "Promise", "Rate", "StepClock", "StepPrices", "looks_of", "promise_of"]
