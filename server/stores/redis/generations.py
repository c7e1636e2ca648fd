"""The generations of namespaces: a drop or a rewind of any shard replaces them, and they are lost with the data."""

from collections.abc import Callable, Sequence
from typing import Any

from histospec.server.stores.redis.keys import GENERATIONS, drops_of, generation, pairs
from histospec.server.stores.redis.servers import Command, Servers

Read = Callable[[Sequence[Command]], list[Any]]


class Generations:
    """The generation of each namespace when the server last looked."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._known: dict[bytes, bytes] = {}

    def saw(self, held: dict[bytes, bytes]) -> None:
        """Adds the generations of namespaces that have none yet."""
        for namespace, now in held.items():
            self._known.setdefault(namespace, now)

    def is_replaced(self, namespace: bytes) -> bool:
        """Returns whether Redis has another generation than this server has seen."""
        (held,) = self._servers.run([("HGET", GENERATIONS, namespace)])
        return bool(self._known.get(namespace, held) != held)

    def renew(self, namespace: bytes, drops: int) -> None:
        """Begins a new generation of a namespace, so that other shards forget what they know of it."""
        (held,) = self._servers.run([("HGET", GENERATIONS, namespace)])
        self._known[namespace] = new = generation(drops_of(held) + drops)
        self._servers.run([("HSET", GENERATIONS, namespace, new)], True)

    def replaced(self, read: Read) -> dict[str, bool]:
        """Returns the namespaces that have another generation now, and whether they were dropped."""
        known = dict(self._known)  # a write may add one meanwhile
        (answer,) = read([("HGETALL", GENERATIONS)])
        held = pairs(answer)
        found = {}
        for namespace, before in known.items():
            now = held.get(namespace)
            if now == before or self._known.get(namespace) != before:
                continue
            found[namespace.decode()] = drops_of(now) > drops_of(before)
            if now is None:
                del self._known[namespace]
            else:
                self._known[namespace] = now
        self.saw(held)
        return found
