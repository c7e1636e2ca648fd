"""How many namespaces a shard takes."""

from collections.abc import Iterable

from histospec.server.errors import LimitExceeded


class Namespaces:
    """Decides which namespaces a caller may create. Lives on the event loop."""

    def __init__(self, stored: Iterable[str], limit: int) -> None:
        self._admitted = set(stored)
        self._limit = limit

    def admit(self, namespace: str) -> None:
        """Makes room for a namespace. Raises LimitExceeded where there are too many already."""
        if namespace in self._admitted:
            return
        if len(self._admitted) >= self._limit:
            text = f"namespace: the server has its limit of {self._limit} namespaces; drop one, or raise "
            raise LimitExceeded(f"{text}--max-namespaces")
        self._admitted.add(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace is dropped."""
        self._admitted.discard(namespace)
