"""Knows where the index may lack what the store has: only there must one look again."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from histospec.native import Engine
from histospec.server.stores.interface import Problem

PARTS = 100_000  # problems remembered of which the index has a part


class Gaps:
    """Lives on the event loop.

    A whole namespace may be lacking: the server has not loaded it, or it was rewound. Or the index has a part of a
    problem: newer responses came while the older ones could not be read.

    What is stored while its namespace is dropped or rewound may be in the index before the index forgets the namespace.
    So a caller that stores asks for the namespace's `life` before the index gets the response, and gives it back
    afterwards: a drop or a rewind ends the life.
    """

    def __init__(self, engine: Engine, whole: bool) -> None:
        """`whole`: whether the index has all that the store has."""
        self._engine = engine
        self._whole = whole
        self._lives: dict[str, object] = {}
        self._namespaces: set[str] = set()
        self._parts: OrderedDict[int, None] = OrderedDict()  # digests

    def possible(self, problem: Problem) -> bool:
        """Whether the store may have responses of the problem that the index has not."""
        return not self._whole or problem.namespace in self._namespaces or self.part(problem) or self._engine.evicted()

    def loaded(self) -> None:
        """The index has all that the store had at the start."""
        self._whole = True

    def add(self, namespace: str) -> None:
        """Something of the namespace is stored that the index has not."""
        self._namespaces.add(namespace)

    def part(self, problem: Problem) -> bool:
        """Whether the index has a part of the problem alone."""
        return bool(self._parts) and _digest(problem) in self._parts

    def add_part(self, problem: Problem) -> None:
        """What is stored of a problem could not be read, or not be indexed; the index may have, or get, the rest."""
        self._parts[_digest(problem)] = None
        while len(self._parts) > PARTS:
            self._parts.popitem(last=False)

    def filled(self, problem: Problem) -> None:
        """The index has all that is stored of the problem."""
        if self._parts:
            self._parts.pop(_digest(problem), None)

    def life(self, namespace: str) -> object:
        """Stands for the namespace until it is dropped or rewound."""
        return self._lives.setdefault(namespace, object())

    def stored(self, problem: Problem, life: object) -> None:
        """A response of a session or an ingest that began in `life` is stored and indexed."""
        if self._lives.get(problem.namespace) is not life:
            self.add(problem.namespace)
            self.add_part(problem)

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
        if self._lives.pop(namespace, None) is not None:  # a caller began meanwhile
            self.add(namespace)


def _digest(problem: Problem) -> int:
    """Of two problems with one digest, one is filled in vain."""
    namespace, prompt, name = problem.identity
    return xxhash.xxh3_128_intdigest(b"\0".join((namespace.encode(), name.encode(), prompt)))
