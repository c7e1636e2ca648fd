"""The verl adapter: stores responses with rewards, logprobs and epochs. One setting of verl switches it on:

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=histospec.client.verl.HistoSpecAgentLoopManager

The settings for drafts are in docs/frameworks/verl.md. Drafts do not need this adapter, because the vLLM adapter
commits finished responses.
"""

from histospec.client.verl.manager import HistoSpecAgentLoopManager

__all__ = ["HistoSpecAgentLoopManager"]
