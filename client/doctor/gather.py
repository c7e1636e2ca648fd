"""Asks the servers, and looks at this environment: everything that the doctor does besides thinking.

Nothing stays behind on a server. The steps are real ones, through the stream, the checks and the engine; but they name
a session that is not open, because an open would make the namespace, and count a lookup.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata as packages
from importlib.util import find_spec
from typing import Any

import grpc
import numpy as np

from histospec.client.config import Config, Endpoint
from histospec.client.doctor.facts import Demand, Facts, Failure, ShardFacts, Vllm
from histospec.client.errors import HistoSpecError
from histospec.client.transport import calls, discovery
from histospec.client.transport.channel import metadata, open_channel
from histospec.client.transport.diagnosis import diagnose
from histospec.client.values import Inspection
from histospec.client.vllm.config import AdapterConfig
from histospec.protocol.arrays import INT32, UINT64
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc

STEPS = 20
"""How many are timed."""


async def gather(config: Config, demand: Demand, timeout: float) -> Facts:
    """What there is to know. Each question takes `timeout` seconds at most; shards are asked side by side."""
    visit = _Visit(config, demand, timeout)
    shards = await visit.shards(await _addresses(config))
    members = {shard.name: shard for facts in shards for shard in facts.known}
    known = {facts.endpoint.address: facts for facts in shards}
    others = [shard for shard in members.values() if shard.address not in known]
    if config.discover and members:  # as a client does, which forgets addresses that do not answer
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
    """Where to ask; a name that leads nowhere is one of them, and says so when it is asked."""
    if not config.discover:
        return list(config.endpoints)
    found = await asyncio.gather(*map(discovery.resolve, config.endpoints), return_exceptions=True)
    return [
        one
        for seed, some in zip(config.endpoints, found, strict=True)
        for one in (some if isinstance(some, list) else [seed])
    ]


class _Visit:
    """To some shards, with the same questions."""

    def __init__(self, config: Config, demand: Demand, timeout: float) -> None:
        self._config = config
        self._demand = demand
        self._timeout = timeout
        self._timing = asyncio.Lock()  # one shard's steps at a time: they are timed

    async def shards(self, endpoints: Sequence[Endpoint]) -> list[ShardFacts]:
        """What each of them says."""
        return await asyncio.gather(*map(self._shard, endpoints))

    async def _shard(self, endpoint: Endpoint) -> ShardFacts:
        config, timeout = self._config, self._timeout
        trouble = await asyncio.to_thread(diagnose, endpoint.address, config.tls, timeout, endpoint.certified)
        if trouble is not None:
            return ShardFacts(endpoint, trouble)
        async with open_channel(grpc.aio, endpoint, config) as channel:
            stub: Any = rpc.DraftServiceStub(channel)
            topology = await self._call(stub.Topology, pb.TopologyRequest())
            asked = time.time()
            answer = await self._call(stub.Inspect, pb.InspectRequest(namespace=config.namespace))
            answered = time.time()
            facts = ShardFacts(endpoint, drafts=not _unknown(topology))
            if not isinstance(topology, Failure):
                facts = replace(facts, known=tuple(discovery.named(topology, endpoint)))
            if isinstance(answer, Failure):
                facts = replace(facts, failure=answer)
                if not (_unknown(answer) and facts.drafts):  # else it is an older server
                    return facts
            else:
                told = calls.read_inspection(answer)
                ahead, doubt = told.time - (asked + answered) / 2, (answered - asked) / 2
                facts = replace(facts, inspection=told, ahead=ahead, doubt=doubt)
            async with self._timing:
                seconds, failure = await self._steps(stub, facts.inspection)
            return replace(facts, steps=tuple(seconds), step_failure=failure)

    async def _call(self, method: Any, request: Any) -> Any:
        """The answer, or the Failure."""
        try:
            return await method(request, timeout=self._timeout, metadata=metadata(self._config))
        except grpc.aio.AioRpcError as error:
            return _failure(error)
        except HistoSpecError as error:
            return Failure(type(error).__name__, str(error))

    async def _steps(self, stub: Any, told: Inspection | None) -> tuple[list[float], Failure | None]:
        """Seconds that each step took after the first, which opens the stream; and why there are no more."""
        wanted = self._demand.draft_tokens
        step = pb.Step(
            sessions=np.zeros(1, UINT64).tobytes(),
            positions=np.zeros(1, INT32).tobytes(),
            lengths=np.zeros(1, INT32).tobytes(),
            max_tokens=wanted if told is None else min(wanted, told.limits.get("draft_tokens", wanted)),
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
                    return seconds, Failure("INTERNAL", "a step is answered by something else")
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
    """Whether there is no such call."""
    return isinstance(answer, Failure) and answer.code == grpc.StatusCode.UNIMPLEMENTED.name


def _failure(error: grpc.aio.AioRpcError) -> Failure:
    return Failure(error.code().name, error.details() or "")


def _adapter() -> str:
    """What is wrong with the settings of the adapter, or nothing."""
    try:
        AdapterConfig.from_environment()
    except ValueError as error:
        return str(error)
    return ""


def _vllm() -> Vllm | None:
    """By the package that has the module: the build for CPUs has another name than the module."""
    if find_spec("vllm") is None:
        return None
    names = packages.packages_distributions().get("vllm", [])
    version = next(filter(None, map(_installed, names)), "unknown")
    return Vllm(version, os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))


def _installed(package: str) -> str | None:
    """Its version; without importing it."""
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return None
