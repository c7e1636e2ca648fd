"""Knows where the index may lack responses that the store has: only those must be read again."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from histospec.native import Engine
from histospec.server.stores.interface import Problem

PARTS = 100_000  # partly indexed problems to remember


class Gaps:
    """Used only on the event loop.

    The index may lack a whole namespace, because the server has not loaded it or it was rewound. Or it has only a part
    of a problem, because newer responses came while the older ones could not be read.

    If a response is stored while its namespace is dropped or rewound, the index may receive it before the index forgets
    the namespace. So a caller that stores first asks for the namespace's `life`, then indexes the response, and then
    gives the life back: a drop or a rewind ends the life.
    """

    def __init__(self, engine: Engine, whole: bool) -> None:
        """`whole`: whether the index has everything that the store has."""
        self._engine = engine
        self._whole = whole
        self._lives: dict[str, object] = {}
        self._namespaces: set[str] = set()
        self._parts: OrderedDict[int, None] = OrderedDict()  # digests

    def possible(self, problem: Problem) -> bool:
        """Returns whether the store may have responses of the problem that the index lacks."""
        return not self._whole or problem.namespace in self._namespaces or self.part(problem) or self._engine.evicted()

    def loaded(self) -> None:
        """Records that the index has everything that the store had at the start."""
        self._whole = True

    def add(self, namespace: str) -> None:
        """Records that the store has responses of the namespace that the index lacks."""
        self._namespaces.add(namespace)

    def part(self, problem: Problem) -> bool:
        """Returns whether the index has only a part of the problem."""
        return bool(self._parts) and _digest(problem) in self._parts

    def add_part(self, problem: Problem) -> None:
        """Records that stored responses of a problem could not be read or indexed; the index may have newer ones."""
        self._parts[_digest(problem)] = None
        while len(self._parts) > PARTS:
            self._parts.popitem(last=False)

    def filled(self, problem: Problem) -> None:
        """Records that the index has all stored responses of the problem."""
        if self._parts:
            self._parts.pop(_digest(problem), None)

    def life(self, namespace: str) -> object:
        """Returns an object that stands for the namespace until it is dropped or rewound."""
        return self._lives.setdefault(namespace, object())

    def stored(self, problem: Problem, life: object) -> None:
        """Records that a response of a session or an ingest that began in `life` is stored and indexed."""
        if self._lives.get(problem.namespace) is not life:
            self.add(problem.namespace)
            self.add_part(problem)

    @contextmanager
    def forgetting(self, namespace: str) -> Iterator[None]:
        """Marks that the store, and then the index, forget the namespace."""
        before = namespace in self._namespaces
        self._lives.pop(namespace, None)
        self._namespaces.discard(namespace)
        try:
            yield
        except BaseException:
            if before:
                self.add(namespace)
            raise
        if self._lives.pop(namespace, None) is not None:  # a caller has asked for a life meanwhile
            self.add(namespace)


def _digest(problem: Problem) -> int:
    """Returns a digest of a problem. If two problems share one, reading one of them again is unneeded but harmless."""
    namespace, prompt, name = problem.identity
    return xxhash.xxh3_128_intdigest(b"\0".join((namespace.encode(), name.encode(), prompt)))
