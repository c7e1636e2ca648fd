"""Which namespaces a shard takes, and how many."""

from collections.abc import Iterable

from histospec.protocol.names import white_space
from histospec.server.errors import InvalidRequest, LimitExceeded


class Namespaces:
    """Decides which namespaces a caller may create. Lives on the event loop."""

    def __init__(self, stored: Iterable[str], limit: int) -> None:
        self._admitted = set(stored)
        self._limit = limit

    def admit(self, namespace: str) -> None:
        """Makes room for a namespace.

        Raises LimitExceeded where there are too many, and InvalidRequest for a new name that begins or ends with
        white space. Such a name that is stored stays in use.
        """
        if namespace in self._admitted:
            return
        if wrong := white_space(namespace):
            raise InvalidRequest(f"namespace: {wrong}")
        if len(self._admitted) >= self._limit:
            text = f"namespace: the server has its limit of {self._limit} namespaces; drop one, or raise "
            raise LimitExceeded(f"{text}--max-namespaces")
        self._admitted.add(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace is dropped."""
        self._admitted.discard(namespace)
