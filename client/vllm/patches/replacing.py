"""Replaces functions and values of vLLM. No other module of HistoSpec assigns to attributes of vLLM."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_REPLACED = "_histospec_replaced"


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes `function` the attribute `name` of a module, class or instance of vLLM. It keeps the old one."""
    setattr(function, _REPLACED, getattr(owner, name))
    setattr(owner, name, function)


def attach(output: Any, name: str, value: Any) -> None:
    """Sets an attribute of one object of vLLM: a new one of the output of a step, or an argument of an engine."""
    setattr(output, name, value)


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of an object of vLLM another value while the block runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def is_replaced(owner: Any, name: str) -> bool:
    """Returns whether `replace` has set the attribute."""
    return hasattr(getattr(owner, name), _REPLACED)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's parameters, in order; without `self` for a bound method."""
    return list(inspect.signature(function).parameters)


def require(function: Callable[..., Any], first: list[str]) -> None:
    """Raises RuntimeError unless the parameters of a function that samples begin with these."""
    found = parameters(function)
    if found[: len(first)] != first:
        raise RuntimeError(
            f"HISTOSPEC_SAMPLING=coupled does not fit this vLLM: {function.__qualname__} takes {', '.join(found)}; "
            f"must begin with {', '.join(first)}. Leave it unset to use vLLM's sampling."
        )
