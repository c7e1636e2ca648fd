"""Measures the time that a process spends in some methods of a class."""

import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")

HOOKS = ("begin", "announce", "ask", "report", "collect", "finish", "settle")
"""The adapter's calls to the client."""


class Stopwatch:
    """Counts the seconds in calls since it was made or reset. Of nested calls, it counts the outer ones.

    It replaces the methods `names` of the class `owner`, for the life of the process.
    """

    def __init__(self, owner: type | None = None, names: Iterable[str] = ()) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[Args, Result]) -> Callable[Args, Result]:
        def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            if self._inside:  # restart() begins, settle() sends
                return function(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return call


def in_histospec() -> Stopwatch:
    """Returns a counter for the adapter's calls to the client."""
    from histospec.client.engines.sessions import RequestSessions

    return Stopwatch(RequestSessions, HOOKS)
