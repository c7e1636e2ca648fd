"""The options of a request: {"histospec": {"problem": "id", "epoch": 3}}, in vLLM in `SamplingParams.extra_args`.

=========== =========================================================================================================
problem     explicit problem id
epoch       version of the policy that generates the response
generated   how many of the last tokens of the prompt were generated before; the request continues after them, and the
            prompt without them identifies the problem
seed        the seed that the response is drawn with; with coupled sampling vLLM's own seed counts instead
sample      the number of the response among its siblings, from 0; with coupled sampling each keeps a seed of its own
commit      false: the request gets drafts, but its response does not join the history; the caller ingests it
=========== =========================================================================================================

Over vLLM's HTTP the options come as `vllm_xargs`, which cannot contain dictionaries. Use a JSON text under "histospec",
or flat keys such as "histospec.problem" (also with an underscore). With `False` under "histospec" the request gets no
session, no drafts and no commit.

Without any option, neither does a request that is no rollout: one that scores its prompt (`prompt_logprobs`), that asks
for one token (`max_tokens=1`: classifiers, health checks, each step of a beam search), or that a router sends to the
engine that prefills for another one. An option, such as `"commit": true`, makes it a rollout.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from histospec.protocol.limits import MAX_EPOCH, MAX_PROBLEM

logger = logging.getLogger("histospec.engines")

ONE_TOKEN = "ask for one token"
MAX_INT64 = 2**63 - 1
KNOWN = ("problem", "epoch", "generated", "commit", "seed", "sample")

T = TypeVar("T")

_warned: set[str] = set()


class Bounds(NamedTuple):
    """The fewest and the most tokens of a response, as its request and the length of the model say."""

    fewest: int
    most: int

    def room(self, length: int) -> int:
        """Returns how many drafted tokens a response of so many can use in a step, which yields one more token."""
        room = self.most - length - 1
        if self.fewest > length:  # vLLM would also forbid a stop token after the draft
            room = min(room, self.fewest - length - 1)
        return max(0, room)

    def least_room(self, length: int, more: int) -> int:
        """Returns the least room of a response of so many tokens after a step that yields 1 to `more` tokens."""
        return 0 if length + 1 < self.fewest <= length + more else self.room(length + more)


class RequestOptions(NamedTuple):
    """The options of a request; None for options that it does not set."""

    problem: str | None = None
    epoch: int | None = None
    generated: int | None = None
    commit: bool | None = None
    seed: int | None = None
    sample: int | None = None
    enabled: bool = True


def read_options(extra_args: Mapping[str, Any] | None, prompt_tokens: int) -> RequestOptions:
    """Returns the options of a request. Ignores invalid ones, with one warning per process and option; never raises."""
    if not extra_args:
        return RequestOptions()
    try:
        given = _gather(extra_args)
    except (ValueError, TypeError) as error:
        _warn("histospec", str(error))
        return RequestOptions()
    if given is None:
        return RequestOptions(enabled=False)
    for name in given.keys() - set(KNOWN):
        _warn(name, f"it is unknown; the options are {', '.join(KNOWN)}")
    options = RequestOptions(
        problem=_use("problem", _problem, given),
        epoch=_use("epoch", partial(_integer, least=0, most=MAX_EPOCH), given),
        generated=_use("generated", partial(_integer, least=0), given),
        commit=_use("commit", _switch, given),
        seed=_use("seed", partial(_integer, least=-MAX_INT64 - 1), given),
        sample=_use("sample", partial(_integer, least=0), given),
    )
    if options.generated is not None and options.generated >= prompt_tokens:
        _warn("generated", f"it is {options.generated}, must be less than the {prompt_tokens} tokens of the prompt")
        return options._replace(generated=None)
    return options


def why_no_rollout(options: RequestOptions, prefills: bool, scores_prompt: bool, one_token: bool) -> str:
    """Returns what a request without a session does, for the log; empty for a rollout.

    Args:
        options: the request's own; any of them makes it a rollout.
        prefills: another engine decodes.
        scores_prompt: it asks for the log-probabilities of its prompt.
        one_token: it generates one token at most.
    """
    if not options.enabled:
        return "are switched off"
    if options != RequestOptions():
        return ""
    if prefills:
        return "prefill for another engine"
    if scores_prompt:
        return "score their prompt"
    return ONE_TOKEN if one_token else ""


def _gather(extra_args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the options as one dictionary; None if the request switches HistoSpec off."""
    nested = extra_args.get("histospec")
    if isinstance(nested, str):
        nested = json.loads(nested)
    if nested is False:
        return None
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"expected an object such as {{'epoch': 3}}, got {nested!r:.80}")
    given: dict[str, Any] = {}
    for key, value in extra_args.items():
        if key.startswith(("histospec.", "histospec_")):
            given[key[len("histospec_") :]] = value
    return given | {str(key): value for key, value in (nested or {}).items()}


def _use(name: str, read: Callable[[Any], T], given: Mapping[str, Any]) -> T | None:
    if given.get(name) is None:
        return None
    try:
        return read(given[name])
    except ValueError as error:
        _warn(name, str(error))
        return None


def _problem(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PROBLEM:
        raise ValueError(f"expected a text of 1 to {MAX_PROBLEM} characters, got {value!r:.80}")
    return value


def _integer(value: Any, least: int, most: int = MAX_INT64) -> int:
    try:
        number = None if isinstance(value, bool) else int(value)
    except (ValueError, TypeError, OverflowError):
        number = None
    rounded = isinstance(value, float) and value != number
    if number is None or rounded or not least <= number <= most:
        raise ValueError(f"expected an integer from {least} to {most}, got {value!r:.80}")
    return number


def _switch(value: Any) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool | int | str) and str(value).lower() in known:
        return known[str(value).lower()]
    raise ValueError(f"expected true or false, got {value!r:.80}")


def _warn(name: str, reason: str) -> None:
    if name not in _warned and len(_warned) < 16:  # bounded, because names come from requests
        _warned.add(name)
        logger.warning("HistoSpec ignores the request option %r: %s. This is logged once.", name[:80], reason)
