"""verl with rewards, logprobs and epochs in the history: one name in verl's own configuration.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=histospec.client.verl.HistoSpecAgentLoopManager

beside the lines for drafts, see docs/frameworks/verl.md. Without it the vLLM adapter commits finished responses by
itself, and that is enough for drafts.
"""

from .manager import HistoSpecAgentLoopManager

__all__ = ["HistoSpecAgentLoopManager"]
