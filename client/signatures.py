"""Signatures of methods that pass their arguments on."""

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def same_as(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Gives a method the arguments of another one, or of a function behind its first argument, which it passes on.

    For type checkers, editors and help().
    """

    def decorated(function: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(method)
        first, *others = signature.parameters.values()
        first = first.replace(name="self", annotation=inspect.Parameter.empty)
        public = [each for each in others if not each.name.startswith("_")]
        signature = signature.replace(parameters=[first, *public], return_annotation=returned)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorated
