"""Asks every shard once, when a worker starts, whether it is there and what it knows."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from histospec.client.core.core import Core
from histospec.client.errors import ConfigurationError, HistoSpecError
from histospec.client.transport import calls
from histospec.client.transport.calls import Call
from histospec.client.transport.many import AT_A_TIME
from histospec.client.values import Inspection


def greet(core: Core, call: Callable[[Call[Inspection]], Inspection], timeout: float) -> list[Inspection]:
    """Asks all shards side by side, each for at most `timeout` seconds; `call` carries out one call.

    Returns:
        What those say that answer, and let this client read. The core says in the log why others do not.

    Raises:
        ConfigurationError: a file with the token or certificates cannot be read.
    """

    def one(item: Call[Inspection]) -> Inspection | None:
        try:
            answer = call(item)
        except ConfigurationError:
            raise
        except HistoSpecError as error:
            code, details = grpc.StatusCode.UNAVAILABLE, str(error)
            if isinstance(error.__cause__, grpc.RpcError):
                reported: Any = error.__cause__
                code, details = reported.code(), reported.details() or ""
            if code is not grpc.StatusCode.UNIMPLEMENTED:  # an older server; should it be none, its streams end so, too
                core.missed(item.shard, code, details, time.monotonic())
            return None
        if "read" not in answer.rights:
            details = f"its token has no right to read in namespace {core.config.namespace!r}"
            core.missed(item.shard, grpc.StatusCode.PERMISSION_DENIED, details, time.monotonic())
            return None
        core.greeted(item.shard)
        return answer

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="histospec") as pool:
        return [answer for answer in pool.map(one, calls.inspect(core, timeout)) if answer is not None]
