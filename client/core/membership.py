"""The shards of a service, and which of them owns a problem."""

from collections.abc import Sequence

from histospec.client.config import DISCOVER, Endpoint
from histospec.client.core.shard import Shard
from histospec.client.core.shared import Shared
from histospec.protocol import placement


class Membership:
    """Not thread-safe; its owner locks."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        config = shared.config
        endpoints = config.endpoints
        if config.discover:
            endpoints = (Endpoint(DISCOVER + ",".join(e.address for e in endpoints), ""),)
        self.shards = [Shard(endpoint, shared) for endpoint in endpoints]
        self._names = [shard.name for shard in self.shards]
        self._leaving: list[Shard] = []

    @property
    def leaving(self) -> list[Shard]:
        """Shards that are no longer members, but still owe an acknowledgement."""
        self._leaving = [shard for shard in self._leaving if not shard.settled]
        return list(self._leaving)

    @property
    def known_leaving(self) -> list[Shard]:
        """As `leaving`, and those that owe nothing any more. Looks at no shard."""
        return list(self._leaving)

    def owner(self, prompt: bytes, problem: str) -> Shard:
        """Returns the shard that owns a problem."""
        if len(self.shards) == 1:
            return self.shards[0]
        digest = placement.problem_digest(self._shared.config.namespace, prompt, problem)
        return self.shards[placement.place(digest, self._names)]

    def update(self, endpoints: Sequence[Endpoint]) -> list[Shard]:
        """Replaces the members. Returns those whose address has changed."""
        known = {shard.name: shard for shard in self.shards + self.leaving}
        members = [known.get(e.name) or Shard(e, self._shared) for e in endpoints]
        self._leaving = [shard for shard in known.values() if shard not in members]
        for shard in known.values():
            shard.left = shard not in members
            shard.queue.member = not shard.left
        elsewhere = []
        for shard, endpoint in zip(members, endpoints, strict=True):
            if shard.endpoint != endpoint:
                shard.endpoint = endpoint
                elsewhere.append(shard)
        self.shards, self._names = members, [shard.name for shard in members]
        return elsewhere
