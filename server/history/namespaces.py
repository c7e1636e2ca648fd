"""Which namespaces a shard takes, and how many; which of their names may have been meant by another one."""

import difflib
from collections.abc import Iterable

from histospec.protocol.names import white_space
from histospec.server.errors import InvalidRequest, LimitExceeded

NEARLY_SAME = 0.75
"""Of `difflib`'s ratio: two of eight characters exchanged."""


def look_alikes(name: str, others: Iterable[str], most: int) -> list[str]:
    """Names that may have been meant by `name`, the most alike first; never the name itself."""
    return difflib.get_close_matches(name, [other for other in others if other != name], most, NEARLY_SAME)


class Namespaces:
    """Decides which namespaces a caller may create. Lives on the event loop."""

    def __init__(self, limit: int) -> None:
        self._admitted: set[str] = set()
        self._limit = limit
        self._known = False

    def know(self, stored: Iterable[str]) -> None:
        """These are in the store. Until this call, any name may be one of them."""
        self._admitted.update(stored)
        self._known = True

    def admit(self, namespace: str) -> None:
        """Makes room for a namespace.

        Raises LimitExceeded where there are too many, and InvalidRequest for a new name that begins or ends with
        white space. Such a name that is stored stays in use.
        """
        if namespace in self._admitted:
            return
        if self._known and (wrong := white_space(namespace)):
            raise InvalidRequest(f"namespace: {wrong}")
        if len(self._admitted) >= self._limit:
            text = f"namespace: the server has its limit of {self._limit} namespaces; drop one, or raise "
            raise LimitExceeded(f"{text}--max-namespaces")
        self._admitted.add(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace is dropped."""
        self._admitted.discard(namespace)
