"""SPEC-RL: new rollouts start from what old ones wrote, as far as the current policy accepts it.

::

    from histospec.client import DraftClient
    from histospec.client.rollouts import SpeculativeRollout

    speculative = SpeculativeRollout(llm, DraftClient(), lenience=math.exp(0.5))
    rollouts = speculative.generate(prompts, SamplingParams(n=8, max_tokens=4096), epoch=3, ingest=False)
    speculative.commit(rollouts, rewards)

Needs vLLM only as the `llm` that it is given. What is exact and what is not: docs/spec-rl.md.
"""

from histospec.client.rollouts.acceptance import accept_prefix
from histospec.client.rollouts.lenience import Geometric, Lenience
from histospec.client.rollouts.speculative import SpeculativeRollout
from histospec.client.rollouts.values import Report, Rollout

__all__ = ["Geometric", "Lenience", "Report", "Rollout", "SpeculativeRollout", "accept_prefix"]
