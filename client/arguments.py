"""Checks of what callers pass in. Each raises ValueError with a sentence that names the argument.

The sentence says what is allowed and what came, and what was meant where that can be told.
"""

import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

LONGEST = 86_400
"""Seconds that anything may be told to wait: a day."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number that travels as a float32."""
_REAL = (float, int, numbers.Real)
_SHOWN = 60
"""Characters of a text in a sentence."""


class Kind(NamedTuple):
    """What a list holds. For a list of lists, `one` and `give` name the mistake of passing a single inner list."""

    many: str
    one: str = ""
    give: str = ""


SESSIONS = Kind("session ids")
PROBLEMS = Kind("problem ids")
SEEDS = Kind("seeds")
QUANTILES = Kind("quantiles")
COUNTS = Kind("counts, one for each session")
VALUES = Kind("values, one for each session")
PROMPTS = Kind("prompts", "prompt", "[prompt]")
TOKEN_LISTS = Kind("token lists, one for each session", "token list", "[tokens]")
LOGPROBS = Kind("logprobs, one list for each session", "session's logprobs", "[logprobs]")
SEED_LISTS = Kind("seed lists, one for each prompt", "seed list", "[seeds]")
RESPONSES = Kind("responses", "list of token ids", "[Response(tokens)]")
RESPONSE_LISTS = Kind("response lists, one for each prompt", "list of token ids", "[[Response(tokens)]]")


def shown(value: object) -> str:
    """A value for a sentence: numbers and short texts as they are written, all else by its type."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... of {len(value)} characters"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return type(value).__name__


def is_number(value: object) -> bool:
    """Whether it is one real number, also one of numpy's; True and False are none."""
    return isinstance(value, _REAL) and not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """Whether it is one number, also as an array or a tensor without dimensions."""
    return is_number(value) or getattr(value, "ndim", None) == 0


def whole(name: str, value: Any, least: int, most: int, limits: str = "") -> int:
    """An integer from `least` to `most`; `limits` says the same in fewer characters."""
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
        raise ValueError(f"{name}: must be an integer, is {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {shown(value)} is outside {limits or f'[{least}, {most}]'}")
    return int(value)


def number(name: str, value: Any, least: float, most: float) -> float:
    """A number from `least` to `most`."""
    if not is_number(value) or not least <= value <= most:
        raise ValueError(f"{name}: must be a number from {least:g} to {most:g}, is {shown(value)}")
    return float(value)


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """How long something may take; `zero` says whether it may be no time at all."""
    if not is_number(value) or not 0 <= value <= LONGEST or not (value or zero):
        least = "from 0 on" if zero else "above 0"
        raise ValueError(
            f"{name}: must be a number of seconds {least}, at most {LONGEST}, such as 0.02; is {shown(value)}"
        )
    return float(value)


def finite(name: str, value: Any) -> float:
    """A number that travels as a float32 and stays finite."""
    result = math.nan
    if not isinstance(value, str | bytes | bytearray) and getattr(value, "ndim", 0) == 0:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            result = float(value)
    if not abs(result) <= LARGEST:
        raise ValueError(f"{name}: must be a finite number, is {shown(value)}")
    return result


def text(name: str, value: Any, most: int) -> str:
    """A string that can travel as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string, is {shown(value)}")
    if len(value) > most:
        raise ValueError(f"{name}: {len(value)} characters are more than the limit of {most}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} of {shown(value)} cannot be written as UTF-8") from None
    return value


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: must be True or False, is {shown(value)}")
    return bool(value)


def instance(name: str, value: Any, kind: type, hint: str) -> None:
    """Raises unless it is one of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: must be a {kind.__name__}, is {shown(value)}; {hint}")


def listed(name: str, values: Any, kind: Kind) -> None:
    """Raises unless these are values in order, as in a list, a tuple or an array; looks at the first of them alone."""
    if type(values) is list and (not kind.one or (values and type(values[0]) is list)):  # as a step has it
        return
    if is_number(values):
        raise ValueError(f"{name}: must be a list of {kind.many}, is {shown(values)}; give [{shown(values)}]")
    unordered = isinstance(values, str | bytes | bytearray | Mapping | set | frozenset)
    if unordered or is_scalar(values) or not (hasattr(values, "__len__") and hasattr(values, "__iter__")):
        raise ValueError(f"{name}: must be a list of {kind.many}, is {shown(values)}")
    if kind.one and is_scalar(next((value for value in values if value is not None), None)):
        raise ValueError(f"{name}: must be a list of {kind.many}; got one {kind.one}, give {kind.give}")


def for_each(name: str, values: Any, kind: Kind, other: str, size: int) -> Sequence[Any]:
    """One value for each of the other argument's; where none are given, None for each."""
    if values is None:
        return [None] * size
    listed(name, values, kind)
    same_length(name, values, other, size)
    return cast(Sequence[Any], values)


def same_length(name: str, values: Any, other: str, size: int) -> None:
    """Raises unless there is one value for each of the other argument's."""
    if len(values) != size:
        raise ValueError(f"{name}: {len(values)} values for {size} {other}")
