"""Puts a function of HistoSpec's in the place of one of vLLM's."""

import inspect
from collections.abc import Callable
from typing import Any

_REPLACED = "_histospec_replaced"


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes `function` the attribute `name` of a module, class or instance of vLLM; it remembers the one before."""
    setattr(function, _REPLACED, getattr(owner, name))
    setattr(owner, name, function)


def is_replaced(owner: Any, name: str) -> bool:
    """Whether the attribute is a function that `replace` put there."""
    return hasattr(getattr(owner, name), _REPLACED)


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of its parameters, in order; those of a method without `self` where it is bound."""
    return list(inspect.signature(function).parameters)
