"""Checks the arguments of callers and turns them into the wire's flat little-endian arrays.

Each function raises a ValueError that names the argument, before the client changes or sends anything.
"""

import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments
from histospec.client.values import Tokens
from histospec.protocol import alternatives
from histospec.protocol.arrays import FLOAT32, INT32
from histospec.protocol.limits import MAX_EPOCH, MAX_PROBLEM, MAX_TOKEN


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
            flat = np.array(list(chain.from_iterable(values)))
        elif kinds == {np.ndarray} and all(v.dtype.kind in "iu" for v in values):  # type: ignore[union-attr]
            flat = np.concatenate(values)
        else:
            flat = np.concatenate([_integers(name, v) for v in values])
        if not flat.size:
            flat = flat.astype(INT32)
        if flat.dtype.kind in "iu" and flat.ndim == 1 and (not flat.size or _largest(flat) <= MAX_TOKEN):
            return flat.astype(INT32, copy=False).tobytes(), list(map(len, values))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    pieces = [token_bytes(f"{name}[{i}]", v) for i, v in enumerate(values)]
    return b"".join(pieces), [len(piece) // 4 for piece in pieces]


def float_bytes(name: str, value: Any, size: int) -> bytes:
    """Returns one float32 per token; no bytes for None."""
    if value is None:
        return b""
    try:
        array = np.asarray(value)
        if array.dtype.kind in "USbcMm":
            raise TypeError(f"they are {array.dtype}")
        with np.errstate(over="ignore"):  # to -inf, which a log-probability may be
            array = array.astype(FLOAT32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name}: must be numbers, {error}") from None
    if array.shape != (size,):
        raise ValueError(f"{name}: must have one value for each of the {size} tokens, has shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError(f"{name}: value {int(np.isnan(array).argmax())} is not a number")
    return array.tobytes()


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
    arguments.listed(name, values, arguments.COUNTS)
    arguments.same_length(name, values, "sessions", size)
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        array = np.asarray(values)
        if not size or (array.dtype.kind in "iu" and array.ndim == 1 and 0 <= array.min() <= array.max() <= most):
            return array.astype(np.int64)
    return np.array([arguments.whole(f"{name}[{i}]", value, 0, most) for i, value in enumerate(values)], np.int64)


def epoch_number(name: str, value: Any) -> int | None:
    """Returns a version of the policy, or None for the newest."""
    if value is None:
        return None
    number = arguments.whole(name, value, 0, (1 << 63) - 1, "[0, 2^63)")
    if number > MAX_EPOCH:
        raise ValueError(f"{name}: {number} is more than the limit of {MAX_EPOCH}")
    return number


def seed_number(name: str, value: Any) -> int | None:
    """Returns a sampling seed, any int64, or None for an unknown one."""
    return None if value is None else arguments.whole(name, value, -1 << 63, (1 << 63) - 1, "[-2^63, 2^63)")


def seed_numbers(name: str, values: Sequence[Any]) -> list[int | None]:
    """Returns `seed_number` of each value."""
    return [seed_number(f"{name}[{i}]", value) for i, value in enumerate(values)]


def change_count(name: str, value: Any) -> int:
    """Returns a number of changes; 0 for None."""
    return 0 if value is None else arguments.whole(name, value, 0, (1 << 32) - 1, "[0, 2^32)")


def reward_number(name: str, value: Any) -> float | None:
    """Returns a finite number, or None."""
    return None if value is None else arguments.finite(name, value)


def problem_name(name: str, value: str | None) -> str:
    """Returns an explicit problem id, or "" for None. Keeps white space at its ends: data sets have such ids."""
    return "" if value is None else arguments.text(name, value, MAX_PROBLEM)


def each(name: str, value: Any, size: int) -> list[tuple[str, Any]]:
    """Returns one value for each session, with its name in error messages, from one value for all or a sequence."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # an array or a tensor without dimensions
    if value is None or np.isscalar(value):
        return [(name, value)] * size
    arguments.listed(name, value, arguments.VALUES)
    arguments.same_length(name, value, "sessions", size)
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
        raise ValueError(f"{name}: must be a flat list of token ids, is {arguments.shown(value)}")
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
            return f"{name}: must be integers; item {i} is {arguments.shown(item)}"
        if not 0 <= item <= MAX_TOKEN:  # such as a number of more than 64 bits
            return f"{name}: token {arguments.shown(item)} is outside [0, {MAX_TOKEN}]"
    return f"{name}: must be integers, is {array.dtype}"
