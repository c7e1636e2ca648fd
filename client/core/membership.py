"""Keeps the list of shards, and says which of them owns a problem."""

from collections.abc import Sequence

from histospec.client.config import DISCOVER, Config, Endpoint
from histospec.client.core.session import Session
from histospec.client.core.shard import ShardState
from histospec.protocol import placement


class Membership:
    """The shards of a service. Not thread-safe; its owner locks."""

    def __init__(self, config: Config) -> None:
        self._config = config
        endpoints = config.endpoints
        if config.discover:
            endpoints = (Endpoint(DISCOVER + ",".join(e.address for e in config.endpoints), ""),)
        self.shards = [ShardState(endpoint, config) for endpoint in endpoints]
        self._names = [shard.name for shard in self.shards]
        self._leaving: list[ShardState] = []

    @property
    def leaving(self) -> list[ShardState]:
        """Shards that are no longer members, but still owe an acknowledgement."""
        self._leaving = [shard for shard in self._leaving if not shard.settled]
        return list(self._leaving)

    @property
    def everybody(self) -> list[ShardState]:
        """The members, and the shards that leave."""
        return self.shards + self.leaving

    def owner(self, prompt: bytes, problem: str) -> ShardState:
        """Returns the shard that owns a problem."""
        if len(self.shards) == 1:
            return self.shards[0]
        digest = placement.problem_digest(self._config.namespace, prompt, problem)
        return self.shards[placement.place(digest, self._names)]

    def owner_of(self, session: Session) -> ShardState:
        """Returns the shard that owns the problem of a session."""
        return self.owner(session.prompt, session.problem)

    def update(self, endpoints: Sequence[Endpoint]) -> list[ShardState]:
        """Replaces the members. Returns those whose address has changed."""
        known = {shard.name: shard for shard in self.everybody}
        members = [known.get(e.name) or ShardState(e, self._config) for e in endpoints]
        elsewhere = []
        for shard, endpoint in zip(members, endpoints, strict=True):
            shard.left = False
            if shard.endpoint != endpoint:
                shard.endpoint = endpoint
                elsewhere.append(shard)
        self._leaving = [shard for shard in known.values() if shard not in members]
        for shard in self._leaving:
            shard.left = True
        self.shards, self._names = members, [shard.name for shard in members]
        return elsewhere
