"""Asks every shard for its state once, when a worker starts; for both clients.

Returns the answers of the shards that let this client read. The core logs why the others do not answer. A token file or
certificate that cannot be read raises ConfigurationError.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from histospec.client.core.core import Core
from histospec.client.core.shard import ShardState
from histospec.client.errors import ConfigurationError, HistoSpecError
from histospec.client.transport import calls
from histospec.client.transport.calls import Call
from histospec.client.transport.many import AT_A_TIME
from histospec.client.values import Inspection


def greet(core: Core, call: Callable[[Call[Inspection]], Inspection], timeout: float) -> list[Inspection]:
    """Asks all shards in parallel, each for at most `timeout` seconds. Returns the answers. `call` makes one call."""

    def one(item: Call[Inspection]) -> Inspection | None:
        try:
            return _answered(core, item.shard, call(item))
        except HistoSpecError as error:
            _missed(core, item.shard, error)
            return None

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="histospec") as pool:
        return [answer for answer in pool.map(one, calls.inspect(core, timeout)) if answer is not None]


async def greet_async(
    core: Core, call: Callable[[Call[Inspection]], Awaitable[Inspection]], timeout: float
) -> list[Inspection]:
    """Like `greet`, for asyncio."""

    async def one(item: Call[Inspection]) -> Inspection | None:
        try:
            return _answered(core, item.shard, await call(item))
        except HistoSpecError as error:
            _missed(core, item.shard, error)
            return None

    found = await asyncio.gather(*map(one, calls.inspect(core, timeout)))
    return [answer for answer in found if answer is not None]


def _answered(core: Core, shard: ShardState, answer: Inspection) -> Inspection | None:
    if "read" in answer.rights:
        core.greeted(shard)
        return answer
    details = f"its token has no right to read in namespace {core.config.namespace!r}"
    core.missed(shard, grpc.StatusCode.PERMISSION_DENIED, details, time.monotonic())
    return None


def _missed(core: Core, shard: ShardState, error: HistoSpecError) -> None:
    if isinstance(error, ConfigurationError):
        raise error
    code, details = grpc.StatusCode.UNAVAILABLE, str(error)
    if isinstance(error.__cause__, grpc.RpcError):
        reported: Any = error.__cause__
        code, details = reported.code(), reported.details() or ""
    if code is not grpc.StatusCode.UNIMPLEMENTED:  # an older server; for any other service the stream reports it
        core.missed(shard, code, details, time.monotonic())
