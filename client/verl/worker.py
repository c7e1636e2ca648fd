"""What is added to verl's agent loop workers, of either kind.

A worker runs the agent loops of some prompts: each a conversation with vLLM, of one turn or many, and a reward at the
end. Here every request tells the adapter in vLLM which problem it belongs to, and that somebody else keeps the
response; and what a loop returns goes to the history as one response, with what only verl knows of it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .history import keep
from .visits import begin


class Remembering:
    """Mixed into a class of verl's workers, before it."""

    async def _run_agent_loop(
        self, sampling_params: Mapping[str, Any], trajectory: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        begin(bool(trajectory["validate"]))
        told = {"histospec": {"problem": problem_of(kwargs["raw_prompt"]), "commit": False}}
        extra_args = {**(sampling_params.get("extra_args") or {}), **told}
        run = super()._run_agent_loop  # type: ignore[misc]
        return await run({**sampling_params, "extra_args": extra_args}, trajectory, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Here rewards are computed, where verl computes them within the rollout."""
        done = await super()._agent_loop_postprocess(output, *args, **kwargs)  # type: ignore[misc]
        for one in output if isinstance(output, list) else [output]:
            keep(one, problem_of(kwargs["raw_prompt"]))
        return done


def problem_of(messages: Any) -> str:
    """The id of a problem: a digest of its messages, the same in every epoch, whatever the turns that follow.

    Args:
        messages: what verl calls `raw_prompt`: dictionaries with a role and a content; pictures count as their bytes.
    """
    text = json.dumps(list(messages), sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> str:
    if hasattr(value, "tobytes"):  # pictures, arrays
        return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
    return type(value).__name__
