"""What a request says about itself in `SamplingParams.extra_args`: {"histospec": {"problem": "id", "epoch": 3}}.

Over HTTP the same comes as `vllm_xargs`, which holds no dictionaries: there a JSON text under "histospec", or the flat
keys "histospec.problem" and "histospec.epoch" (also with an underscore), say it. `False` under "histospec" leaves the
request alone: no session, no drafts, no commit; for calls that only score a text.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..tokens import MAX_PROBLEM

logger = logging.getLogger("vllm.histospec")

MAX_EPOCH = 2**63 - 1

T = TypeVar("T")

_warned: set[str] = set()


class RequestOptions(NamedTuple):
    """What a request asked for; None where it said nothing."""

    problem: str | None = None
    epoch: int | None = None
    enabled: bool = True


def read_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Never raises: what cannot be used is ignored, with one warning a process and field."""
    if not extra_args:
        return RequestOptions()
    try:
        given = _gather(extra_args)
    except (ValueError, TypeError) as error:
        _warn("histospec", str(error))
        return RequestOptions()
    if given is None:
        return RequestOptions(enabled=False)
    for name in given.keys() - {"problem", "epoch"}:
        _warn(name, "unknown; known are 'problem' and 'epoch'")
    return RequestOptions(_use("problem", _problem, given), _use("epoch", _epoch, given))


def _gather(extra_args: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options as one dictionary; None when the request wants to be left alone."""
    nested = extra_args.get("histospec")
    if isinstance(nested, str):
        nested = json.loads(nested)
    if nested is False:
        return None
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"expected an object with 'problem' and 'epoch', got {nested!r:.80}")
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


def _epoch(value: Any) -> int:
    try:
        # Not int(value): it would round 2.5 and take True.
        epoch = None if isinstance(value, bool) or float(value) != int(value) else int(value)
    except (ValueError, TypeError, OverflowError):
        epoch = None
    if epoch is None or not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"expected an integer from 0 to {MAX_EPOCH}, got {value!r:.80}")
    return epoch


def _warn(name: str, reason: str) -> None:
    if name not in _warned and len(_warned) < 16:  # bounded: names come from requests
        _warned.add(name)
        logger.warning("HistoSpec ignores the request option %r: %s. Said once.", name[:80], reason)
