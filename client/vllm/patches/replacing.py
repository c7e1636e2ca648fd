"""Replaces a function of vLLM by one of HistoSpec."""

import inspect
from collections.abc import Callable
from typing import Any

_REPLACED = "_histospec_replaced"


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes `function` the attribute `name` of a module, class or instance of vLLM. It keeps the old one."""
    setattr(function, _REPLACED, getattr(owner, name))
    setattr(owner, name, function)


def is_replaced(owner: Any, name: str) -> bool:
    """Returns whether `replace` has set the attribute."""
    return hasattr(getattr(owner, name), _REPLACED)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's parameters, in order; without `self` for a bound method."""
    return list(inspect.signature(function).parameters)
