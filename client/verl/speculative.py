"""SPEC-RL in verl: an agent loop whose responses start with the prefix of an old response that the policy accepts.

    old response -> one request scores it (`prompt_logprobs`) -> accept_prefix -> one request generates the rest

It is verl's own agent loop for a single turn, with another server client.
"""

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from histospec.client import Response
from histospec.client.rollouts.acceptance import accept_until_wrong, lenience_of
from histospec.client.rollouts.old import Old, ResponseLimits, cut, not_reused, outside
from histospec.client.rollouts.sampling import objection
from histospec.client.verl import history
from histospec.client.verl.interface import SingleTurnAgentLoop, TokenOutput, copy_to_local, get_generation_config
from histospec.client.verl.visits import one_old, validating

MEDIA = ("image_data", "video_data", "audio_data")

_random = np.random.default_rng()


class _Scored(NamedTuple):
    """An old response, scored by the current policy."""

    old: Old
    logprobs: list[float]
    kept: int
    output: Any
    """verl's output of the request that scored it."""


class SpeculativeServer:
    """verl's client of its vLLM servers, with a `generate` that reuses old responses.

    Args:
        server: verl's `LLMServerClient`.
        lenience: see `histospec.client.rollouts.accept_prefix`.
        most: how many tokens a response may have.
        room: how many tokens a prompt and its response may have together.
        stops: the stop tokens.
        vocabulary: how many tokens the model has.
    """

    def __init__(
        self, server: Any, lenience: float, most: int, room: int, stops: frozenset[int], vocabulary: int
    ) -> None:
        self._server = server
        self._lenience = lenience
        self._most = most
        self._room = room
        self._stops = stops
        self._vocabulary = vocabulary

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any], **others: Any
    ) -> Any:
        """Generates as verl's client does. `extra_fields` also has `reused_tokens` and `lenience`."""
        scored = None
        if not (validating() or objection(SimpleNamespace(**sampling_params)) or any(others.get(m) for m in MEDIA)):
            problem = _options(sampling_params)["problem"]
            async with one_old(problem, prompt_ids) as response:
                limits = ResponseLimits(self._most, self._room - len(prompt_ids) - 1, 0, self._stops)
                old = cut(response, limits) if response and self._knows(response) else None
                scored = await self._score(request_id, prompt_ids, old, others) if old else None
                output = await self._rest(request_id, prompt_ids, sampling_params, scored, others)
        else:
            output = await self._rest(request_id, prompt_ids, sampling_params, None, others)
        kept = scored.kept if scored else 0
        output.extra_fields |= {"reused_tokens": kept, "lenience": self._lenience if scored else None}
        return output

    def _knows(self, response: Response) -> bool:
        """Returns whether the model has all tokens of a response; vLLM refuses to score others."""
        wrong = outside(response, self._vocabulary)
        if wrong is not None:
            history.report("does not reuse a response", not_reused(wrong, self._vocabulary))
        return wrong is None

    async def _score(self, request_id: str, prompt: list[int], old: Old, others: Mapping[str, Any]) -> _Scored | None:
        output = await self._server.generate(
            request_id,
            prompt_ids=[*prompt, *old.tokens.tolist()],
            sampling_params={
                "temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": True,
                "extra_args": {"histospec": False},
            },
            **others,
        )  # fmt: skip
        rows = output.extra_fields.pop("prompt_logprobs", None)
        output.extra_fields.pop("prompt_ids", None)
        if rows is None:  # the request was aborted
            return None
        logprobs = [row[0] for row in rows[len(prompt) - 1 :][: len(old.tokens)]]  # row i scores token i + 1
        if len(logprobs) < len(old.tokens):
            return None
        kept = accept_until_wrong(logprobs, old.logprobs, self._lenience, _random.random(len(logprobs)))
        return _Scored(old, logprobs, kept, output)

    async def _rest(
        self,
        request_id: str,
        prompt: list[int],
        sampling_params: Mapping[str, Any],
        scored: _Scored | None,
        others: Mapping[str, Any],
    ) -> Any:
        """Returns the response: the kept prefix, and what vLLM generates after it."""
        if scored is None or not scored.kept:
            return await self._server.generate(
                request_id, prompt_ids=prompt, sampling_params=dict(sampling_params), **others
            )
        kept, logprobs = scored.old.tokens[: scored.kept].tolist(), scored.logprobs[: scored.kept]
        if scored.old.ended and len(kept) == len(scored.old.tokens):
            return TokenOutput(
                token_ids=kept, log_probs=logprobs, stop_reason="completed", extra_fields=scored.output.extra_fields
            )
        told = {"histospec": {**_options(sampling_params), "generated": len(kept)}}
        output = await self._server.generate(
            request_id,
            prompt_ids=[*prompt, *kept],
            sampling_params={**sampling_params, "max_tokens": self._most - len(kept), "extra_args": told},
            **others,
        )
        output.token_ids = [*kept, *output.token_ids]
        output.log_probs = [*logprobs, *(output.log_probs or ())]
        return output


class SpeculativeAgentLoop(SingleTurnAgentLoop):
    """verl's agent loop of a single turn, with reuse of old responses. Set it in
    `rollout.agent.agent_loop_config_path`.

    With reuse, responses are not distributed exactly as the current policy's own: see docs/spec-rl.md.

    Args:
        server_manager: verl's `LLMServerClient`.
        lenience: how much less likely than before a token may be and still be kept; 1 is the plain ratio of the
            policies, 0 reuses nothing.
        args: verl's.
        others: verl's.

    Raises:
        ValueError: lenience is negative or not a number, or reuse does not work with the configuration of the rollout.
    """

    def __init__(self, *args: Any, server_manager: Any, lenience: float, **others: Any) -> None:
        super().__init__(*args, server_manager=server_manager, **others)
        rollout = self.rollout_config
        sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
        if reason := objection(SimpleNamespace(**sampling)):
            raise ValueError(f"actor_rollout_ref.rollout: {reason}")
        if not rollout.calculate_log_probs:
            raise ValueError(
                "actor_rollout_ref.rollout.calculate_log_probs: is off; set it, SPEC-RL needs the logprobs of responses"
            )
        if rollout.enable_rollout_routing_replay:
            raise ValueError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay: is on; switch it off to reuse responses"
            )
        self.server_manager = SpeculativeServer(
            server_manager,
            lenience_of(lenience, None),
            rollout.response_length,
            min(rollout.prompt_length + rollout.response_length, rollout.max_model_len or 2**31),
            frozenset() if rollout.ignore_eos else _stops(self.config.actor_rollout_ref.model.path, self.tokenizer),
            len(self.tokenizer),
        )


@functools.cache
def _stops(model: str, tokenizer: Any) -> frozenset[int]:
    """Returns the stop tokens as vLLM collects them."""
    generation = get_generation_config(copy_to_local(model))
    ends: int | Sequence[int] | None = getattr(generation, "eos_token_id", None)
    found = {tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or ())}
    return frozenset(found - {None})


def _options(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a request, which `Remembering` sets."""
    try:
        return dict(sampling_params["extra_args"]["histospec"])
    except KeyError:
        raise ValueError(
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class: SPEC-RL needs "
            "histospec.client.verl.HistoSpecAgentLoopManager; set it"
        ) from None
