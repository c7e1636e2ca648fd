"""Checks of arguments. Each check raises ValueError with a message that names the argument.

The message says what is allowed and what was given, and what to give instead if the mistake is a common one.
"""

import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from histospec.protocol.redaction import redacted

LONGEST = 86_400
"""The longest timeout: a day, in seconds."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest finite float32."""
_REAL = (float, int, numbers.Real)
_SHOWN = 60
"""How many characters of a text a message shows."""


class Kind(NamedTuple):
    """The elements of a list, for messages. For a list of lists, `one` and `give` explain how to pass a single one."""

    many: str
    one: str = ""
    give: str = ""


SESSIONS = Kind("session ids")
PROBLEMS = Kind("problem ids")
SEEDS = Kind("seeds")
QUANTILES = Kind("quantiles")
GENERATED = Kind("numbers of generated tokens, one for each prompt")
COUNTS = Kind("counts, one for each session")
VALUES = Kind("values, one for each session")
PROMPTS = Kind("prompts", "prompt", "[prompt]")
TOKEN_LISTS = Kind("token lists, one for each session", "token list", "[tokens]")
LOGPROBS = Kind("logprobs, one list for each session", "session's logprobs", "[logprobs]")
ALTERNATIVES = Kind("packed alternatives, bytes or None for each session", "session's alternatives", "[alternatives]")
SEED_LISTS = Kind("seed lists, one for each prompt", "seed list", "[seeds]")
RESPONSES = Kind("responses", "list of token ids", "[Response(tokens)]")
RESPONSE_LISTS = Kind("response lists, one for each prompt", "list of token ids", "[[Response(tokens)]]")


def shown(value: object) -> str:
    """Returns a value as text for a message: numbers and short texts literally, without the user, password and query
    of a URL; other values as their type."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = redacted(value)
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... of {len(value)} characters"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return type(value).__name__


def is_number(value: object) -> bool:
    """Returns whether a value is one real number, of Python or numpy; True and False are not."""
    return isinstance(value, _REAL) and not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """Returns whether a value is one number, or an array or a tensor without dimensions."""
    return is_number(value) or getattr(value, "ndim", None) == 0


def whole(name: str, value: Any, least: int, most: int, limits: str = "") -> int:
    """Returns an integer from `least` to `most`. Messages show `limits` instead of the two numbers if it is given."""
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
        raise ValueError(f"{name}: must be an integer, is {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {shown(value)} is outside {limits or f'[{least}, {most}]'}")
    return int(value)


def number(name: str, value: Any, least: float, most: float) -> float:
    """Returns a number from `least` to `most`."""
    if not is_number(value) or not least <= value <= most:
        raise ValueError(f"{name}: must be a number from {least:g} to {most:g}, is {shown(value)}")
    return float(value)


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Returns a timeout in seconds; `zero` allows 0."""
    if not is_number(value) or not 0 <= value <= LONGEST or not (value or zero):
        allowed = f"from 0 to {LONGEST}" if zero else f"above 0, at most {LONGEST}"
        raise ValueError(f"{name}: must be a number of seconds {allowed}, such as 0.02; is {shown(value)}")
    return float(value)


def finite(name: str, value: Any) -> float:
    """Returns a number that is finite as a float32."""
    result = math.nan
    if not isinstance(value, str | bytes | bytearray) and getattr(value, "ndim", 0) == 0:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            result = float(value)
    if not abs(result) <= LARGEST:
        raise ValueError(f"{name}: must be a finite number, is {shown(value)}")
    return result


def text(name: str, value: Any, most: int) -> str:
    """Returns a string of at most `most` characters that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string, is {shown(value)}")
    if len(value) > most:
        raise ValueError(f"{name}: {len(value)} characters are more than the limit of {most}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} of {shown(value)} cannot be encoded as UTF-8") from None
    return value


def flag(name: str, value: Any) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: must be True or False, is {shown(value)}")
    return bool(value)


def instance(name: str, value: Any, kind: type, hint: str) -> None:
    """Raises unless the value is of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: must be a {kind.__name__}, is {shown(value)}; {hint}")


def listed(name: str, values: Any, kind: Kind) -> None:
    """Raises unless the values are in order, as in a list, a tuple or an array. Checks the first element only."""
    if type(values) is list and (
        not kind.one or (values and (type(values[0]) is list or getattr(values[0], "ndim", 0) == 1))
    ):  # fast path for steps
        return
    if is_number(values):
        raise ValueError(f"{name}: must be a list of {kind.many}, is {shown(values)}; give [{shown(values)}]")
    unordered = isinstance(values, str | bytes | bytearray | Mapping | set | frozenset)
    if unordered or is_scalar(values) or not (hasattr(values, "__len__") and hasattr(values, "__iter__")):
        raise ValueError(f"{name}: must be a list of {kind.many}, is {shown(values)}")
    if kind.one and is_scalar(next((value for value in values if value is not None), None)):
        raise ValueError(f"{name}: must be a list of {kind.many}; got one {kind.one}, give {kind.give}")


def for_each(name: str, values: Any, kind: Kind, other: str, size: int) -> Sequence[Any]:
    """Returns one value for each element of the other argument; None for each if no values are given."""
    if values is None:
        return [None] * size
    listed(name, values, kind)
    same_length(name, values, other, size)
    return cast(Sequence[Any], values)


def same_length(name: str, values: Any, other: str, size: int) -> None:
    """Raises unless there is one value for each element of the other argument."""
    if len(values) != size:
        raise ValueError(f"{name}: {len(values)} values for {size} {other}")
