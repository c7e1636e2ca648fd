"""Checks of arguments, some of which turn them into the wire's flat little-endian arrays.

Each check raises a ValueError that names the argument, before the client changes or sends anything. The message says
what is allowed and what was given, and what to give instead if the mistake is a common one.
"""

import contextlib
import math
import numbers
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from histospec.client.values import Tokens
from histospec.protocol import alternatives
from histospec.protocol.arrays import FLOAT32, INT32
from histospec.protocol.limits import MAX_EPOCH, MAX_PROBLEM, MAX_TOKEN
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
VALUES = Kind("values, one for each session or response")
PROMPTS = Kind("prompts", "prompt", "[prompt]")
TOKEN_LISTS = Kind("token lists, one for each session", "token list", "[tokens]")
LOGPROBS = Kind("logprobs, one list for each session", "session's logprobs", "[logprobs]")
ALTERNATIVES = Kind("packed alternatives, bytes or None for each session", "session's alternatives", "[alternatives]")
SEED_LISTS = Kind("seed lists, one for each prompt", "seed list", "[seeds]")
RESPONSES = Kind("responses", "list of token ids", "[Response(tokens)]")
ROWS = Kind("responses, one for each prompt", "list of token ids", "[tokens]")
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


# ---- as arrays of the wire ------------------------------------------------------------------------------------------


def token_bytes(name: str, value: Tokens, *, empty: bool = True) -> bytes:
    """Returns the tokens as int32 bytes. `empty`: there may be none."""
    array = _integers(name, value)
    if not array.size:
        if empty:
            return b""
        raise ValueError(f"{name}: must not be empty")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN:
        raise ValueError(f"{name}: token {low if low < 0 else high} is outside [0, {MAX_TOKEN}]")
    return array.astype(INT32).tobytes()


def batch_bytes(name: str, values: Sequence[Tokens]) -> tuple[bytes, list[int]]:
    """Returns all tokens of a batch as int32 bytes, one list after the other, and the length of each list.

    Checks the batch as one array, and each list only to find out which one is wrong.
    """
    kinds = set(map(type, values))
    try:
        if kinds <= {list, tuple, range}:
            tokens = list(chain.from_iterable(values))
            if set(map(type, tokens)) == {int} and min(tokens) >= 0:  # of so few, `pack` is faster than an array
                return struct.pack(f"<{len(tokens)}i", *tokens), list(map(len, values))
            flat = np.array(tokens)
        elif kinds == {np.ndarray} and all(v.dtype.kind in "iu" for v in values):  # type: ignore[union-attr]
            flat = np.concatenate(values)
        else:
            flat = np.concatenate([_integers(name, v) for v in values])
        if not flat.size:
            flat = flat.astype(INT32)
        if flat.dtype.kind in "iu" and flat.ndim == 1 and (not flat.size or _largest(flat) <= MAX_TOKEN):
            return flat.astype(INT32, copy=False).tobytes(), list(map(len, values))
    except (TypeError, ValueError, OverflowError, RuntimeError, struct.error):
        pass
    pieces = [token_bytes(f"{name}[{i}]", v) for i, v in enumerate(values)]
    return b"".join(pieces), [len(piece) // 4 for piece in pieces]


def float_bytes(name: str, value: Any, size: int) -> bytes:
    """Returns one float32 per token; no bytes for None."""
    if value is None:
        return b""
    array = _floats(name, value, size)
    if np.isnan(array).any():
        raise ValueError(f"{name}: value {int(np.isnan(array).argmax())} is not a number")
    return array.tobytes()


def known_logprobs(name: str, value: Any, size: int) -> NDArray[np.float32] | None:
    """Returns one float32 per token; None if the value is None or empty, or one of its values is None or NaN."""
    if value is None or (not is_scalar(value) and hasattr(value, "__len__") and not len(value)):
        return None
    array = _floats(name, value, size)
    return None if np.isnan(array).any() else array


def known_reward(name: str, value: Any) -> float | None:
    """Returns a number, or the sum of the numbers of a list. None if there is none, or one is None or NaN, or the
    result is not finite as a float32."""
    if value is None:
        return None
    if isinstance(value, numbers.Number) or getattr(value, "ndim", None) == 0:
        with contextlib.suppress(TypeError, ValueError):
            try:
                total = float(value)  # complex raises
            except OverflowError:
                total = math.inf
            return total if abs(total) <= LARGEST else None
        raise ValueError(f"{name}: must be a number, or a list of numbers, is {shown(value)}")
    array = _numbers(name, value)
    total = float(array.astype(np.float64).sum()) if array.size else math.nan
    return total if abs(total) <= LARGEST else None


def _floats(name: str, value: Any, size: int) -> NDArray[np.float32]:
    array = _numbers(name, value)
    if array.shape != (size,):
        raise ValueError(f"{name}: must have one value for each of the {size} tokens, has shape {array.shape}")
    return array


def _numbers(name: str, value: Any) -> NDArray[np.float32]:
    """Returns the values as float32, with NaN for None."""
    try:
        array = np.asarray(value)
        if array.dtype.kind in "USbcMm":
            raise TypeError(f"they are {array.dtype}")
        with np.errstate(over="ignore"):  # to -inf, which a log-probability may be
            return array.astype(FLOAT32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name}: must be numbers, {error}") from None


def alternative_bytes(name: str, value: Any, size: int) -> bytes:
    """Returns packed alternatives for so many tokens; no bytes for None."""
    if value is None:
        return b""
    if not isinstance(value, bytes):
        raise ValueError(
            f"{name}: must be bytes that histospec.protocol.alternatives.pack made, is {type(value).__name__}"
        )
    if fault := alternatives.fault(value, size):
        raise ValueError(f"{name}: {fault}")
    return value


def mask_bytes(name: str, value: Any, size: int) -> bytes:
    """Returns one uint8 per token, 0 or 1; no bytes for None."""
    if value is None:
        return b""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name}: every value must be True or False") from None
    if array.shape != (size,):
        raise ValueError(f"{name}: must have one value for each of the {size} tokens, has shape {array.shape}")
    if array.dtype.kind not in "biu" or ((array != 0) & (array != 1)).any():
        raise ValueError(f"{name}: every value must be True or False")
    return array.astype(np.uint8).tobytes()


def counts(name: str, values: Any, size: int, most: int) -> NDArray[np.int64]:
    """Returns int64[size], one number per session, each at most `most`."""
    listed(name, values, COUNTS)
    same_length(name, values, "sessions", size)
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        array = np.asarray(values)
        if not size or (array.dtype.kind in "iu" and array.ndim == 1 and 0 <= array.min() <= array.max() <= most):
            return array.astype(np.int64)
    return np.array([whole(f"{name}[{i}]", value, 0, most) for i, value in enumerate(values)], np.int64)


def epoch_number(name: str, value: Any) -> int | None:
    """Returns a version of the policy, or None for the newest."""
    if value is None:
        return None
    number = whole(name, value, 0, (1 << 63) - 1, "[0, 2^63)")
    if number > MAX_EPOCH:
        raise ValueError(f"{name}: {number} is more than the limit of {MAX_EPOCH}")
    return number


def seed_number(name: str, value: Any) -> int | None:
    """Returns a sampling seed, any int64, or None for an unknown one."""
    return None if value is None else whole(name, value, -1 << 63, (1 << 63) - 1, "[-2^63, 2^63)")


def seed_numbers(name: str, values: Sequence[Any]) -> list[int | None]:
    """Returns `seed_number` of each value."""
    return [seed_number(f"{name}[{i}]", value) for i, value in enumerate(values)]


def change_count(name: str, value: Any) -> int:
    """Returns a number of changes; 0 for None."""
    return 0 if value is None else whole(name, value, 0, (1 << 32) - 1, "[0, 2^32)")


def reward_number(name: str, value: Any) -> float | None:
    """Returns a finite number, or None."""
    return None if value is None else finite(name, value)


def problem_name(name: str, value: str | None) -> str:
    """Returns an explicit problem id, or "" for None. Keeps white space at its ends: data sets have such ids."""
    return "" if value is None else text(name, value, MAX_PROBLEM)


def each(name: str, value: Any, size: int, other: str = "sessions") -> list[tuple[str, Any]]:
    """Returns a value for each element of the other argument, with its name for messages, from one or a list."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # an array or a tensor without dimensions
    if value is None or np.isscalar(value):
        return [(name, value)] * size
    listed(name, value, VALUES)
    same_length(name, value, other, size)
    return [(f"{name}[{i}]", v) for i, v in enumerate(value)]


def _largest(array: NDArray[np.integer]) -> int:
    """Returns the largest element; a negative one counts as larger than every token."""
    return int(np.maximum.reduce(array.view(f"u{array.itemsize}")))


def _integers(name: str, value: Tokens) -> NDArray[np.integer]:
    if isinstance(value, str | bytes):
        raise ValueError(f"{name}: must be token ids, is {type(value).__name__}; tokenize it first")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        what = "got a list of lists" if _holds_lists(value) else str(error)
        raise ValueError(f"{name}: must be a flat list of token ids; {what}") from None
    if array.ndim == 0:
        raise ValueError(f"{name}: must be a flat list of token ids, is {shown(value)}")
    if array.ndim != 1:
        raise ValueError(f"{name}: must be a flat list of token ids; got a list of lists, of shape {array.shape}")
    if not array.size:
        return np.empty(0, INT32)
    if array.dtype.kind not in "iu":
        raise ValueError(_not_integers(name, value, array))
    return array


def _holds_lists(value: Any) -> bool:
    return isinstance(value, Sequence) and any(isinstance(item, Sequence | np.ndarray) for item in value)


def _not_integers(name: str, value: Any, array: NDArray[Any]) -> str:
    for i, item in enumerate(array if isinstance(value, np.ndarray) else value):
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            return f"{name}: must be integers; item {i} is {shown(item)}"
        if not 0 <= item <= MAX_TOKEN:  # such as a number of more than 64 bits
            return f"{name}: token {shown(item)} is outside [0, {MAX_TOKEN}]"
    return f"{name}: must be integers, is {array.dtype}"
