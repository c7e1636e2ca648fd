"""Finds the shards of a service, and follows their changes.

::

    seeds ──DNS──► addresses ──Topology──► answers ──union──► members ──► core

A seed's name may lead to one shard that knows all others (--peers), to all shards, each of which knows only itself (a
headless Service of Kubernetes), or to both. Each round asks the addresses that have not answered yet, those of shards
whose breaker is not closed, and one random other address. So the cost does not grow with the number of shards.
"""

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Sequence
from typing import Any

import grpc

from histospec.client.config import MAX_ENDPOINT, Config, Endpoint
from histospec.client.core.core import Core
from histospec.client.errors import HistoSpecError
from histospec.client.transport import answers
from histospec.client.transport.channel import metadata, open_channel
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc

log = logging.getLogger("histospec.client")

FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0
"""Seconds until the next try while no shard answers; the pause doubles from the first to the last."""
UNWELL_PAUSE = 2.0
"""Seconds until the next round while the breaker of a shard is not closed: the shard may have moved."""
ASK_SECONDS = 2.0
SIDE_BY_SIDE = 16


class Discovery:
    """Keeps the members of a core up to date, as a task on the loop of its streams."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._resolved: dict[str, list[Endpoint]] = {}
        self._answers: dict[str, list[Endpoint]] = {}
        """The shards that each address named; the latest answer is last."""
        self._members: dict[str, Endpoint] = {}
        self._named_at: dict[str, float] = {}
        """When an answer last named each shard."""
        self._limit = asyncio.Semaphore(SIDE_BY_SIDE)

    async def run(self) -> None:
        """Looks for shards at intervals. Never returns."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self.refresh(time.monotonic())
            except Exception:  # a bug must not end the discovery
                log.exception("HistoSpec: looking for shards failed")
            self._core.looked()
            if not self._members:
                pause, wait = min(2 * pause, LAST_PAUSE), pause
            else:
                wait = UNWELL_PAUSE if self._unwell() else self._core.config.timeouts.discovery
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))  # so that a thousand workers do not ask at once

    async def refresh(self, now: float) -> None:
        """Runs one round, and updates the core if the members have changed."""
        addresses = await self._resolve()
        self._answers = {address: answer for address, answer in self._answers.items() if address in addresses}
        again = self._unwell() | ({random.choice(list(self._answers))} if self._answers else set())
        await self._ask([e for a, e in addresses.items() if a not in self._answers or a in again])
        if not self._answers:  # the seeds do not answer; the known shards may
            await self._ask(list(self._members.values()))
        named = {shard.name: shard for answer in self._answers.values() for shard in answer}
        self._named_at |= dict.fromkeys(named, now)
        leave = self._core.config.timeouts.leave
        stay = {name: e for name, e in self._members.items() if not named or now - self._named_at[name] <= leave}
        members = {**stay, **named}
        if members != self._members:
            self._members = members
            self._core.update([members[name] for name in sorted(members)])

    def _unwell(self) -> set[str]:
        """Returns the addresses of shards whose breaker is not closed."""
        return {shard.endpoint.address for shard in self._core.shards if shard.state != "closed"}

    async def _resolve(self) -> dict[str, Endpoint]:
        """Returns the addresses of the seeds' names; for a name that cannot be resolved, its last addresses."""
        seeds = self._core.config.endpoints
        for seed, found in zip(seeds, await asyncio.gather(*map(resolve, seeds), return_exceptions=True), strict=True):
            if isinstance(found, list):
                self._resolved[seed.address] = found
            else:
                log.debug("HistoSpec: %s cannot be resolved: %s", seed.address, found)
        return {e.address: e for some in self._resolved.values() for e in some}

    async def _ask(self, endpoints: Sequence[Endpoint]) -> None:
        """Asks each endpoint for the shards that it knows. Keeps the earlier answer of one that does not answer."""
        answers = await asyncio.gather(*(ask(e, self._core.config, self._limit) for e in endpoints))
        first: dict[str, Endpoint] = {}
        for endpoint, answer in zip(endpoints, answers, strict=True):
            if answer is None:
                continue
            self._answers.pop(endpoint.address, None)
            self._answers[endpoint.address] = answer
            for shard in answer:
                if shard.address == endpoint.address != first.setdefault(shard.name, shard).address:
                    log.warning(
                        "HistoSpec: two shards, at %s and %s, are both named %s: give each a --shard-name of its own",
                        first[shard.name].address, shard.address, shard.name,
                    )  # fmt: skip


async def resolve(seed: Endpoint) -> list[Endpoint]:
    """Returns the addresses that the name in an address has now. Raises OSError."""
    host, _, port = seed.address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(_written(where[0], where[1]) for *_, where in found)
    certified = None if _is_address(host) else host
    return [Endpoint(address, address, certified) for address in addresses]


async def ask(endpoint: Endpoint, config: Config, limit: asyncio.Semaphore) -> list[Endpoint] | None:
    """Returns the shards that the one at this endpoint knows; None if it does not answer."""
    async with limit:
        try:
            return await topology(endpoint, config, ASK_SECONDS)
        except (grpc.RpcError, HistoSpecError) as error:
            log.debug("HistoSpec: %s does not name the shards: %s", endpoint.address, error)
            return None


async def topology(endpoint: Endpoint, config: Config, timeout: float) -> list[Endpoint]:
    """Returns the shards that the one at this endpoint knows. Raises grpc.RpcError or HistoSpecError."""
    async with open_channel(grpc.aio, endpoint, config, longest=MAX_ENDPOINT) as channel:
        call: Any = rpc.DraftServiceStub(channel).Topology
        return named(await call(pb.TopologyRequest(), timeout=timeout, metadata=metadata(config)), endpoint)


def named(answer: pb.TopologyResponse, endpoint: Endpoint) -> list[Endpoint]:
    """Returns the shards that the one at this endpoint named. Raises ServerError if it cannot be true."""
    shards = answers.read(f"Topology on {endpoint.address}", answers.topology, pb.TopologyRequest(), answer)
    return [
        Endpoint(shard.name, endpoint.address, endpoint.certified)
        if shard.listening
        else Endpoint(shard.name, shard.address)
        for shard in shards
    ]


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
