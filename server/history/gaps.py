"""Knows where the index may lack what the store has, although it has had all of it: only there must one look again."""

from collections.abc import Iterator
from contextlib import contextmanager

from histospec.native import Engine


class Gaps:
    """Lives on the event loop.

    What is stored while its namespace is dropped or rewound may be in the index before the index forgets the namespace.
    So whoever stores asks for the namespace's `life` before the index gets the response, and gives it back afterwards:
    a drop or a rewind ends the life.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lives: dict[str, object] = {}
        self._namespaces: set[str] = set()

    def possible(self, namespace: str) -> bool:
        """Whether the store may have responses of the namespace that the index has not."""
        return namespace in self._namespaces or self._engine.evicted()

    def add(self, namespace: str) -> None:
        """Something is stored that the index has not."""
        self._namespaces.add(namespace)

    def life(self, namespace: str) -> object:
        """Stands for the namespace until it is dropped or rewound."""
        return self._lives.setdefault(namespace, object())

    def stored(self, namespace: str, life: object) -> None:
        """A response of a session or an ingest that began in `life` is stored and indexed."""
        if self._lives.get(namespace) is not life:
            self.add(namespace)

    @contextmanager
    def forgetting(self, namespace: str) -> Iterator[None]:
        """The store, then the index forget the namespace."""
        before = namespace in self._namespaces
        self._lives.pop(namespace, None)
        self._namespaces.discard(namespace)
        try:
            yield
        except BaseException:
            if before:
                self.add(namespace)
            raise
        if self._lives.pop(namespace, None) is not None:  # somebody began meanwhile
            self.add(namespace)
