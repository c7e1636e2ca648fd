"""The additions to verl's agent loop workers of both kinds.

A worker runs the agent loops of some prompts. Each loop is a conversation with vLLM, of one turn or many, with a reward
at its end. The additions give every request its problem id, with coupled sampling its seed, and tell the vLLM adapter
not to commit its response. They store the result of each loop as one response, with the reward, logprobs and epoch that
only verl knows.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from histospec.client.verl.coupled import draw, drawn
from histospec.client.verl.history import keep
from histospec.client.verl.visits import begin


class Remembering:
    """A mixin for verl's worker classes; list it before them."""

    async def _run_agent_loop(
        self, sampling_params: Mapping[str, Any], trajectory: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        begin(bool(trajectory["validate"]))
        problem = problem_of(kwargs["raw_prompt"])
        told = {"histospec": {"problem": problem, "commit": False}}
        parameters = {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), **told}}
        seed = draw(sampling_params.get("seed"), problem, trajectory, kwargs.get("session_id"))
        if seed is not None:
            parameters["seed"] = seed
        return await super()._run_agent_loop(parameters, trajectory, **kwargs)  # type: ignore[misc]

    async def _agent_loop_postprocess(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Stores the output after verl's own processing, which may compute the rewards."""
        done = await super()._agent_loop_postprocess(output, *args, **kwargs)  # type: ignore[misc]
        for one in output if isinstance(output, list) else [output]:
            keep(one, problem_of(kwargs["raw_prompt"]), drawn())
        return done


def problem_of(messages: Any) -> str:
    """Returns the id of a problem: a digest of its first messages, the same in every epoch and for all turns.

    Args:
        messages: verl's `raw_prompt`: dictionaries with a role and a content; images count as their bytes.
    """
    text = json.dumps(list(messages), sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> str:
    if hasattr(value, "tobytes"):  # images, arrays
        return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
    return type(value).__name__
