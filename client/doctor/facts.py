"""The facts that the checks work on, and how they are gathered from the servers and from this environment.

The calls leave nothing behind on a server. The steps pass through the stream, the checks and the engine, but for a
session that is not open, because opening one would create the namespace and count a lookup.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata as packages
from importlib.util import find_spec
from typing import Any, TypeVar

import grpc
import numpy as np

from histospec.client.config import Config, Endpoint
from histospec.client.errors import HistoSpecError
from histospec.client.transport import answers, discovery
from histospec.client.transport.channel import metadata, open_channel
from histospec.client.transport.diagnosis import Trouble, diagnose
from histospec.client.values import Inspection
from histospec.client.vllm.config import AdapterConfig
from histospec.protocol.arrays import INT32, UINT64
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc

T = TypeVar("T")

STEPS = 20
"""How many steps are timed."""


@dataclass(frozen=True)
class Demand:
    """What vLLM will ask for."""

    draft_tokens: int = 16
    """`num_speculative_tokens`"""
    sequences: int = 256
    """`max_num_seqs`"""


@dataclass(frozen=True)
class Failure:
    """A call that failed."""

    code: str
    """Status code of gRPC, such as UNAUTHENTICATED."""
    details: str


@dataclass(frozen=True)
class ShardFacts:
    """Facts about one shard."""

    endpoint: Endpoint
    trouble: Trouble | None = None
    """Why there is no connection; the other facts are then missing."""
    failure: Failure | None = None
    """Why the call Inspect failed; None if it succeeded."""
    inspection: Inspection | None = None
    ahead: float = 0.0
    """How many seconds its clock is ahead of this machine's."""
    doubt: float = 0.0
    """Uncertainty of `ahead`, in seconds: half the time of the call."""
    drafts: bool = True
    """Whether it is a draft server."""
    known: tuple[Endpoint, ...] = ()
    """The shards that it knows, including itself."""
    steps: tuple[float, ...] = ()
    """Seconds that each step took, from here to the engine and back."""
    step_failure: Failure | None = None
    """Why a step failed; None if all succeeded."""


@dataclass(frozen=True)
class Vllm:
    """Facts about vLLM in this environment."""

    version: str
    runner: str | None
    """Value of VLLM_USE_V2_MODEL_RUNNER; None if it is not set."""
    plugins: str | None = None
    """Value of VLLM_PLUGINS; None if it is not set, so that vLLM loads all of them."""


@dataclass(frozen=True)
class Facts:
    """All facts."""

    config: Config
    version: str
    """Version of this client."""
    demand: Demand = Demand()
    shards: tuple[ShardFacts, ...] = ()
    others: tuple[Endpoint, ...] = ()
    """Shards that the listed shards know but the list does not contain."""
    vllm: Vllm | None = None
    """None if vLLM is not installed here."""
    adapter: str = ""
    """What is wrong with the settings of the vLLM adapter; empty if they are valid."""

    @property
    def answering(self) -> list[tuple[ShardFacts, Inspection]]:
        """The shards whose call Inspect succeeded."""
        return [(shard, shard.inspection) for shard in self.shards if shard.inspection is not None]


async def gather(config: Config, demand: Demand, timeout: float) -> Facts:
    """Returns all facts. Each call takes at most `timeout` seconds; shards are asked in parallel."""
    visit = _Visit(config, demand, timeout)
    shards = await visit.shards(await _addresses(config))
    members = {shard.name: shard for facts in shards for shard in facts.known}
    known = {facts.endpoint.address: facts for facts in shards}
    others = [shard for shard in members.values() if shard.address not in known]
    if config.discover and members:  # a client, too, then uses the shards' own addresses
        known |= {facts.endpoint.address: facts for facts in await visit.shards(others)}
        shards = [replace(known[shard.address], endpoint=shard) for shard in members.values()]
    asked = {facts.endpoint.name for facts in shards}
    asked |= {facts.inspection.shard for facts in shards if facts.inspection is not None}
    return Facts(
        config=config,
        version=_installed("histospec") or "unknown",
        demand=demand,
        shards=tuple(shards),
        others=tuple(shard for shard in others if shard.name not in asked),
        vllm=_vllm(),
        adapter=_adapter(),
    )


async def _addresses(config: Config) -> list[Endpoint]:
    """Returns the addresses to ask. A name that cannot be resolved stays among them, so that its call reports why."""
    if not config.discover:
        return list(config.endpoints)
    found = await asyncio.gather(*map(discovery.resolve, config.endpoints), return_exceptions=True)
    return [
        one
        for seed, some in zip(config.endpoints, found, strict=True)
        for one in (some if isinstance(some, list) else [seed])
    ]


class _Visit:
    """Makes the same calls to several shards."""

    def __init__(self, config: Config, demand: Demand, timeout: float) -> None:
        self._config = config
        self._demand = demand
        self._timeout = timeout
        self._timing = asyncio.Lock()  # the steps of one shard at a time, because they are timed

    async def shards(self, endpoints: Sequence[Endpoint]) -> list[ShardFacts]:
        """Returns the facts about each of these shards."""
        return await asyncio.gather(*map(self._shard, endpoints))

    async def _shard(self, endpoint: Endpoint) -> ShardFacts:
        config, timeout = self._config, self._timeout
        trouble = await asyncio.to_thread(diagnose, endpoint.address, config.tls, timeout, endpoint.certified)
        if trouble is not None:
            return ShardFacts(endpoint, trouble)
        async with open_channel(grpc.aio, endpoint, config) as channel:
            stub: Any = rpc.DraftServiceStub(channel)
            topology = await self._call(
                stub.Topology, pb.TopologyRequest(), lambda _, answer: discovery.named(answer, endpoint)
            )
            asked = time.time()
            inspection = await self._call(
                stub.Inspect, pb.InspectRequest(namespace=config.namespace), answers.inspection
            )
            answered = time.time()
            facts = ShardFacts(endpoint, drafts=not _unknown(topology))
            if not isinstance(topology, Failure):
                facts = replace(facts, known=tuple(topology))
            if isinstance(inspection, Failure):
                return replace(facts, failure=inspection)
            ahead, doubt = inspection.time - (asked + answered) / 2, (answered - asked) / 2
            facts = replace(facts, inspection=inspection, ahead=ahead, doubt=doubt)
            async with self._timing:
                seconds, failure = await self._steps(stub, inspection)
            return replace(facts, steps=tuple(seconds), step_failure=failure)

    async def _call(self, method: Any, request: Any, read: Callable[[Any, Any], T]) -> T | Failure:
        """Returns what `read` makes of the answer, or the Failure."""
        try:
            answer = await method(request, timeout=self._timeout, metadata=metadata(self._config))
            return answers.read("its answer", read, request, answer)
        except grpc.aio.AioRpcError as error:
            return _failure(error)
        except HistoSpecError as error:
            return Failure(type(error).__name__, str(error))

    async def _steps(self, stub: Any, inspection: Inspection) -> tuple[list[float], Failure | None]:
        """Times steps. Returns the seconds of each after the first, which opens the stream, and why a step failed."""
        wanted = self._demand.draft_tokens
        step = pb.Step(
            sessions=np.zeros(1, UINT64).tobytes(),
            positions=np.zeros(1, INT32).tobytes(),
            lengths=np.zeros(1, INT32).tobytes(),
            max_tokens=min(wanted, inspection.limits.get("draft_tokens", wanted)),
            verify_cost=DEFAULT_VERIFY_COST,
        )
        seconds: list[float] = []
        end = time.monotonic() + self._timeout
        stream = stub.Draft(metadata=metadata(self._config))
        try:
            for sequence in range(STEPS + 1):
                started = time.perf_counter()
                await stream.write(pb.DraftRequest(sequence=sequence, step=step))
                answer = await asyncio.wait_for(stream.read(), self._timeout)
                if answer is grpc.aio.EOF or answer.sequence != sequence:  # type: ignore[attr-defined]
                    return seconds, Failure("INTERNAL", "the answer to a step has another sequence number")
                if sequence > 0:
                    seconds.append(time.perf_counter() - started)
                    if time.monotonic() > end:
                        break
            await stream.done_writing()
            await asyncio.wait_for(stream.read(), self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return seconds, Failure("DEADLINE_EXCEEDED", f"no answer within {self._timeout:g} s")
        except grpc.aio.AioRpcError as error:
            return seconds, _failure(error)
        except asyncio.InvalidStateError:  # the stream ended before the write
            return seconds, Failure((await stream.code()).name, await stream.details() or "")
        finally:
            stream.cancel()
        return seconds, None


def _unknown(answer: Any) -> bool:
    """Returns whether the server does not have this call."""
    return isinstance(answer, Failure) and answer.code == grpc.StatusCode.UNIMPLEMENTED.name


def _failure(error: grpc.aio.AioRpcError) -> Failure:
    return Failure(error.code().name, error.details() or "")


def _adapter() -> str:
    """Returns what is wrong with the settings of the adapter; an empty text if they are valid."""
    try:
        AdapterConfig.from_environment()
    except ValueError as error:
        return str(error)
    return ""


def _vllm() -> Vllm | None:
    """Looks vLLM up by the package that contains the module, because the CPU build has another package name."""
    if find_spec("vllm") is None:
        return None
    names = packages.packages_distributions().get("vllm", [])
    version = next(filter(None, map(_installed, names)), "unknown")
    return Vllm(version, os.environ.get("VLLM_USE_V2_MODEL_RUNNER"), os.environ.get("VLLM_PLUGINS"))


def _installed(package: str) -> str | None:
    """Returns the version of a package without importing it; None if it is not installed."""
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return None
