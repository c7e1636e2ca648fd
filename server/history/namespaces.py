"""Decides which namespaces may be created, and finds names that a caller may have meant."""

import difflib
from collections.abc import Iterable

from histospec.protocol.names import white_space
from histospec.server.errors import InvalidRequest, LimitExceeded

NEARLY_SAME = 0.75
"""The minimum ratio of `difflib`: two of eight characters differ."""


def look_alikes(name: str, others: Iterable[str], most: int) -> list[str]:
    """Returns names similar to `name`, the most similar first; never `name` itself."""
    return difflib.get_close_matches(name, [other for other in others if other != name], most, NEARLY_SAME)


class Namespaces:
    """Decides which namespaces a caller may create. Used only on the event loop."""

    def __init__(self, limit: int) -> None:
        self._admitted: set[str] = set()
        self._limit = limit
        self._known = False

    def know(self, stored: Iterable[str]) -> None:
        """Adds the namespaces of the store. Before this call, any name may be one of them."""
        self._admitted.update(stored)
        self._known = True

    def admit(self, namespace: str) -> None:
        """Adds a namespace if it is new.

        Raises LimitExceeded if there are too many, and InvalidRequest for a new name that begins or ends with white
        space. A stored namespace with such a name remains usable.
        """
        if namespace in self._admitted:
            return
        if self._known and (wrong := white_space(namespace)):
            raise InvalidRequest(f"namespace: {wrong}")
        if len(self._admitted) >= self._limit:
            text = f"namespace: the server is at its limit of {self._limit} namespaces; drop one, or raise "
            raise LimitExceeded(f"{text}--max-namespaces")
        self._admitted.add(namespace)

    def forget(self, namespace: str) -> None:
        """Removes a dropped namespace."""
        self._admitted.discard(namespace)
