"""Checks what callers pass in and turns it into the wire's flat little-endian arrays.

Everything here raises ValueError with a sentence that names the argument, before anything is changed or sent.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histospec.client.values import Tokens
from histospec.protocol.arrays import FLOAT32, INT32
from histospec.protocol.limits import MAX_EPOCH, MAX_PROBLEM, MAX_TOKEN


def token_bytes(name: str, value: Tokens, *, empty: bool = True) -> bytes:
    """The tokens as int32 bytes; `empty` says whether there may be none."""
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
    """All tokens of a batch as int32 bytes, one after the other, and the length of each.

    The batch is checked as one array, and looked through one by one only to say which is wrong.
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
        if flat.dtype.kind in "iu" and flat.ndim == 1 and (not flat.size or 0 <= flat.min() <= flat.max() <= MAX_TOKEN):
            return flat.astype(INT32, copy=False).tobytes(), list(map(len, values))
    except (TypeError, ValueError, OverflowError):
        pass
    pieces = [token_bytes(f"{name}[{i}]", v) for i, v in enumerate(values)]
    return b"".join(pieces), [len(piece) // 4 for piece in pieces]


def float_bytes(name: str, value: Any, size: int) -> bytes:
    """One float32 a token, or nothing for None."""
    if value is None:
        return b""
    try:
        array = np.asarray(value, FLOAT32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be numbers, {error}") from None
    if array.shape != (size,):
        raise ValueError(f"{name}: must have one value for each of the {size} tokens, has shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError(f"{name}: value {int(np.isnan(array).argmax())} is not a number")
    return array.tobytes()


def mask_bytes(name: str, value: Any, size: int) -> bytes:
    """One uint8 a token, 0 or 1, or nothing for None."""
    if value is None:
        return b""
    array = np.asarray(value)
    if array.shape != (size,):
        raise ValueError(f"{name}: must have one value for each of the {size} tokens, has shape {array.shape}")
    if array.dtype.kind not in "biu" or ((array != 0) & (array != 1)).any():
        raise ValueError(f"{name}: every value must be True or False")
    return array.astype(np.uint8).tobytes()


def epoch_number(name: str, value: Any) -> int | None:
    """A version of the policy, or None for the newest."""
    if value is None:
        return None
    number = _whole_number(name, value, 63)
    if number > MAX_EPOCH:
        raise ValueError(f"{name}: {number} is more than the limit of {MAX_EPOCH}")
    return number


def seed_number(name: str, value: Any) -> int | None:
    """A sampling seed, any int64, or None for one that nobody knows."""
    return None if value is None else _whole_number(name, value, 63, signed=True)


def seed_numbers(name: str, values: Sequence[Any]) -> list[int | None]:
    """One `seed_number` each."""
    return [seed_number(f"{name}[{i}]", value) for i, value in enumerate(values)]


def change_count(name: str, value: Any) -> int:
    """How often something changed; None stands for never."""
    return 0 if value is None else _whole_number(name, value, 32)


def _whole_number(name: str, value: Any, bits: int, signed: bool = False) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}: must be an integer, is {value!r}")
    if not (-1 << bits if signed else 0) <= value < 1 << bits:
        raise ValueError(f"{name}: {value} is outside [{f'-2^{bits}' if signed else 0}, 2^{bits})")
    return int(value)


def reward_number(name: str, value: Any) -> float | None:
    """A finite number, or None."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: must be a finite number, is {value!r}")
    return number


def same_length(name: str, values: Sequence[Any], other: str, size: int) -> None:
    """Raises unless there is one value for each of the other argument's."""
    if len(values) != size:
        raise ValueError(f"{name}: {len(values)} values for {size} {other}")


def _integers(name: str, value: Tokens) -> NDArray[np.integer]:
    if isinstance(value, str | bytes):
        raise ValueError(f"{name}: must be token ids, is {type(value).__name__}")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: must be a flat sequence of integers, {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{name}: must be one-dimensional, has shape {array.shape}")
    if not array.size:
        return np.empty(0, INT32)
    if array.dtype.kind == "O" and all(isinstance(x, int) for x in array):
        beyond = next(x for x in array if not 0 <= x <= MAX_TOKEN)  # what needs more than 64 bits
        raise ValueError(f"{name}: token {beyond} is outside [0, {MAX_TOKEN}]")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: must be integers, is {array.dtype}")
    return array


def problem_name(name: str, value: str | None) -> str:
    """An explicit problem id, or "" for none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string, is {value!r}")
    if len(value) > MAX_PROBLEM:
        raise ValueError(f"{name}: {len(value)} characters are more than the limit of {MAX_PROBLEM}")
    return value


def each(name: str, value: Any, size: int) -> list[tuple[str, Any]]:
    """One value for each session, with its name, from one for all or a sequence."""
    if value is None or np.isscalar(value):
        return [(name, value)] * size
    same_length(name, value, "sessions", size)
    return [(f"{name}[{i}]", v) for i, v in enumerate(value)]
