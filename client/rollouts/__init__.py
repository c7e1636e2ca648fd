"""For trainers: SPEC-RL with vLLM, and metrics of drafts.

In SPEC-RL, new rollouts start with the prefix of an old response that the current policy accepts.

::

    from histospec.client import DraftClient
    from histospec.client.rollouts import SpeculativeRollout

    speculative = SpeculativeRollout(llm, DraftClient(), lenience=math.exp(0.5))
    rollouts = speculative.generate(prompts, SamplingParams(n=8, max_tokens=4096), epoch=3, ingest=False)
    speculative.commit(rollouts, rewards)

It imports nothing of vLLM. docs/spec-rl.md says what is exact and what is not. `RolloutMetrics` says what the drafts of
a training step gave; docs/frameworks has its lines for each trainer.
"""

from histospec.client.rollouts.acceptance import Geometric, Lenience, accept_prefix
from histospec.client.rollouts.metrics import RolloutMetrics
from histospec.client.rollouts.speculative import SpeculativeRollout
from histospec.client.rollouts.values import Report, Rollout

__all__ = ["Geometric", "Lenience", "Report", "Rollout", "RolloutMetrics", "SpeculativeRollout", "accept_prefix"]
