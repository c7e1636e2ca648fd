"""Asks the servers, and looks at this environment: everything that the doctor does besides thinking.

Nothing stays behind on a server. The steps are real ones, through the stream, the checks and the engine; but they name
a session that is not open, because an open would make the namespace, and count a lookup.
"""

import asyncio
import os
import time
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
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.name


async def gather(config: Config, demand: Demand, timeout: float) -> Facts:
    """What there is to know. Each question takes `timeout` seconds at most; shards are asked side by side."""
    shards = await _ask(await _addresses(config), config, demand, timeout)
    members = {shard.name: shard for facts in shards for shard in facts.known}
    known = {facts.endpoint.address: facts for facts in shards}
    others = [shard for shard in members.values() if shard.address not in known]
    if config.discover and members:  # as a client does, which forgets the addresses where nobody answers
        known |= {facts.endpoint.address: facts for facts in await _ask(others, config, demand, timeout)}
        shards = [replace(known[shard.address], endpoint=shard) for shard in members.values()]
        others = []
    return Facts(
        config=config,
        version=_installed("histospec") or "unknown",
        demand=demand,
        shards=tuple(shards),
        others=tuple(others),
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


async def _ask(endpoints: list[Endpoint], config: Config, demand: Demand, timeout: float) -> list[ShardFacts]:
    return await asyncio.gather(*(_shard(endpoint, config, demand, timeout) for endpoint in endpoints))


async def _shard(endpoint: Endpoint, config: Config, demand: Demand, timeout: float) -> ShardFacts:
    trouble = await asyncio.to_thread(diagnose, endpoint.address, config.tls, timeout, endpoint.certified)
    if trouble is not None:
        return ShardFacts(endpoint, trouble)
    async with open_channel(grpc.aio, endpoint, config) as channel:
        stub: Any = rpc.DraftServiceStub(channel)
        topology = await _unary(stub.Topology, pb.TopologyRequest(), config, timeout)
        asked = time.time()
        answer = await _unary(stub.Inspect, pb.InspectRequest(namespace=config.namespace), config, timeout)
        answered = time.time()
        if isinstance(answer, Failure):
            # An older server does not know Inspect; what does not know Topology is no draft server.
            drafts = not (isinstance(topology, Failure) and topology.code == UNIMPLEMENTED)
            return ShardFacts(endpoint, failure=answer, drafts=drafts)
        told = calls.read_inspection(answer)
        steps, failure = await _steps(stub, config, _longest(demand, told), timeout)
        return ShardFacts(
            endpoint,
            inspection=told,
            ahead=told.time - (asked + answered) / 2,
            doubt=(answered - asked) / 2,
            known=() if isinstance(topology, Failure) else tuple(discovery.named(topology, endpoint)),
            steps=tuple(steps),
            step_failure=failure,
        )


def _longest(demand: Demand, told: Inspection) -> int:
    """The draft to ask for: what vLLM wants, or the most that the server gives."""
    return min(demand.draft_tokens, told.limits.get("draft_tokens", demand.draft_tokens))


async def _unary(method: Any, request: Any, config: Config, timeout: float) -> Any:
    """The answer, or the Failure."""
    try:
        return await method(request, timeout=timeout, metadata=metadata(config))
    except grpc.aio.AioRpcError as error:
        return _failure(error)
    except HistoSpecError as error:
        return Failure(type(error).__name__, str(error))


def _failure(error: grpc.aio.AioRpcError) -> Failure:
    return Failure(error.code().name, error.details() or "")


async def _steps(stub: Any, config: Config, max_tokens: int, timeout: float) -> tuple[list[float], Failure | None]:
    """Seconds that each step took after the first, which opens the stream; and why there are no more."""
    step = pb.Step(
        sessions=np.zeros(1, UINT64).tobytes(),
        positions=np.zeros(1, INT32).tobytes(),
        lengths=np.zeros(1, INT32).tobytes(),
        max_tokens=max_tokens,
        verify_cost=DEFAULT_VERIFY_COST,
    )
    seconds: list[float] = []
    end = time.monotonic() + timeout
    stream = stub.Draft(metadata=metadata(config))
    try:
        for sequence in range(STEPS + 1):
            started = time.perf_counter()
            await stream.write(pb.DraftRequest(sequence=sequence, step=step))
            answer = await asyncio.wait_for(stream.read(), timeout)
            if answer is grpc.aio.EOF or answer.sequence != sequence:  # type: ignore[attr-defined]
                return seconds, Failure("INTERNAL", "a step is answered by something else")
            if sequence > 0:
                seconds.append(time.perf_counter() - started)
                if time.monotonic() > end:
                    break
        await stream.done_writing()
        await asyncio.wait_for(stream.read(), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        return seconds, Failure("DEADLINE_EXCEEDED", f"no answer within {timeout:g} s")
    except grpc.aio.AioRpcError as error:
        return seconds, _failure(error)
    except asyncio.InvalidStateError:  # the stream ended before the write
        return seconds, Failure((await stream.code()).name, await stream.details() or "")
    finally:
        stream.cancel()
    return seconds, None


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
