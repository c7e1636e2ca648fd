"""The parts of vLLM that SPEC-RL depends on: sampling parameters, limits, and logprobs.

vLLM's objects are arguments, so this module does not import vLLM. It was checked against the source of vLLM 0.27 and
run with 0.32.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histospec.client.rollouts.old import ResponseLimits

_OWN = "SPEC-RL compares the model's own probabilities at temperature 1, and this setting changes them"
_WHOLE = "vLLM would search the continuation only, not the reused prefix"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "temperature": ((1,), _OWN),
    "top_p": ((1,), _OWN),
    "top_k": ((0, -1), _OWN),
    "min_p": ((0,), _OWN),
    "presence_penalty": ((0,), _OWN),
    "frequency_penalty": ((0,), _OWN),
    "repetition_penalty": ((1,), _OWN),
    "logit_bias": ((None, {}), _OWN),
    "allowed_token_ids": ((None,), _OWN),
    "bad_words": ((None, []), _OWN),
    "structured_outputs": ((None,), _OWN),
    "thinking_token_budget": ((None,), _OWN),
    "stop": ((None, []), f"{_WHOLE}; use stop_token_ids"),
    "repetition_detection": ((None,), _WHOLE),
}
"""By sampling parameter: the allowed values, and what is wrong with others."""


def objection(parameters: Any) -> str | None:
    """Returns why prefixes cannot be reused with these SamplingParams; None if they can."""
    for name, (fine, reason) in _REFUSED.items():
        value = getattr(parameters, name, fine[0])
        if value not in fine:
            return f"sampling_params.{name}: {value!r:.80} does not work with reuse: {reason}"
    return None


def check_logprobs(llm: Any) -> None:
    """Raises ValueError if vLLM is configured to return other values in place of logprobs."""
    mode = str(getattr(_model(llm), "logprobs_mode", "raw_logprobs"))
    if not mode.endswith("logprobs"):
        raise ValueError(f"llm: logprobs_mode is {mode!r}, which returns no logprobs; use 'raw_logprobs', the default")


def stop_tokens(llm: Any, parameters: Any) -> frozenset[int]:
    """Returns the stop tokens as vLLM collects them: those of the request, and the model's own."""
    stops = set(parameters.stop_token_ids or ())
    if not parameters.ignore_eos:
        model = _model(llm)
        ends = model.try_get_generation_config().get("eos_token_id")
        stops.update([ends] if isinstance(ends, int) else ends or ())
        if not model.skip_tokenizer_init:
            stops.add(llm.get_tokenizer().eos_token_id)
    return frozenset(stops - {None})


def vocabulary(llm: Any) -> int:
    """Returns how many tokens the model has; vLLM refuses prompts with others."""
    return int(_model(llm).get_vocab_size())


def limits_of(llm: Any, parameters: Any, prompt: int, stops: frozenset[int]) -> ResponseLimits:
    """Returns the limits of a response to a prompt of this many tokens."""
    room = max(0, int(_model(llm).max_model_len) - prompt)
    most = room if parameters.max_tokens is None else min(room, parameters.max_tokens)
    return ResponseLimits(most, max(0, room - 1), parameters.min_tokens, stops)


def to_score(parameters: Any) -> Any:
    """Returns SamplingParams for a pass that returns the logprobs of its prompt. vLLM also generates one unused token.

    The pass does not read the prefix cache, because vLLM returns no logprobs for cached positions.
    """
    return type(parameters)(
        temperature=0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, skip_reading_prefix_cache=True,
        detokenize=False, output_kind=type(parameters.output_kind).FINAL_ONLY, extra_args={"histospec": False},
    )  # fmt: skip


def to_continue(parameters: Any, kept: int, most: int, seed: int | None, problem: str | None, epoch: int | None) -> Any:
    """Returns SamplingParams for a request whose prompt ends with the kept prefix, and which generates the rest."""
    one = copy.copy(parameters)  # vLLM clones it again
    one.n, one.seed = 1, seed
    one.max_tokens = most - kept
    one.min_tokens = min(max(0, parameters.min_tokens - kept), one.max_tokens)
    one.logprobs, one.prompt_logprobs, one.flat_logprobs, one.detokenize = 0, None, True, False
    one.output_kind = type(parameters.output_kind).FINAL_ONLY
    one.extra_args = _options(parameters.extra_args or {}, kept, problem, epoch)
    return one


def _options(extra_args: Mapping[str, Any], kept: int, problem: str | None, epoch: int | None) -> dict[str, Any]:
    given = extra_args.get("histospec")
    if given is False:  # no drafts
        return dict(extra_args)
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"sampling_params.extra_args: 'histospec' must be a dictionary or False, is {given!r:.80}")
    ours = {"problem": problem, "epoch": epoch, "generated": kept, "commit": False}
    return {**extra_args, "histospec": {**(given or {}), **{k: v for k, v in ours.items() if v is not None}}}


def prompt_logprobs(output: Any, start: int) -> NDArray[np.float32]:
    """Returns the logprobs of a scored prompt from position `start` on, as float32[m]."""
    return _chosen(output.prompt_logprobs, start)


def written(output: Any) -> tuple[NDArray[np.int32], NDArray[np.float32], str]:
    """Returns the tokens int32[n] that a request generated, their logprobs float32[n], and why it ended."""
    (only,) = output.outputs
    return np.array(only.token_ids, np.int32), _chosen(only.logprobs, 0), str(only.finish_reason)


def _chosen(flat: Any, start: int) -> NDArray[np.float32]:
    """Returns the first logprob of every position of vLLM's FlatLogprobs: that of the token at the position."""
    return np.array(flat.logprobs, np.float32)[np.array(flat.start_indices[start:], np.int64)]


def _model(llm: Any) -> Any:
    return llm.llm_engine.vllm_config.model_config
