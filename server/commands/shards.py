"""The shards of a running service, and calls to them with retries, for commands that move a whole history."""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import grpc

from histospec.client.config import Config, Endpoint
from histospec.client.errors import HistoSpecError as ClientError
from histospec.client.errors import from_status
from histospec.client.transport.channel import metadata, open_channel
from histospec.protocol import placement
from histospec.server.arguments import whole
from histospec.server.commands import connection
from histospec.server.errors import HistoSpecError, Unavailable
from histospec.server.process import run_loop, say
from histospec.server.stores.interface import Problem
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc

PATIENCE = 60.0
"""Seconds that a command waits for a shard that is unreachable, restarting or overloaded."""
PAUSES = (0.25, 0.5, 1.0, 2.0)  # seconds before each retry; the last one repeats
ASK_SECONDS = 5.0
MOST_SHARDS = 10_000
EVERY = "*"
"""The pattern that matches every namespace."""
LATER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
)
"""The statuses of calls that may succeed on a retry."""
# Pings detect a shard whose machine vanished: an export has no deadline and would otherwise wait forever.
PINGS = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000)]

T = TypeVar("T")


class ShardsError(HistoSpecError):
    """A shard could not answer a request."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose namespaces and shards, and those of `connection`."""
    parser.add_argument(
        "--namespace", metavar="PATTERN", default=EVERY, help="only namespaces that match, such as 'run-*'"
    )
    help_ = "number of shards; fail unless all of them answer"
    parser.add_argument("--shards", metavar="N", type=whole(1, MOST_SHARDS), default=None, help=help_)
    connection.add_options(parser)


class Shards:
    """All shards of a service, with a channel to each. As a context manager, closes the channels.

    Args:
        config: how to reach them. Listed shards have the names that clients give them, discovered ones their own.
        expected: the required number of shards; None: any.

    Raises:
        Unavailable: some of them do not answer within PATIENCE seconds.

    """

    def __init__(self, config: Config, expected: int | None = None) -> None:
        self._config = config
        self._lock = Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._endpoints = {endpoint.name: endpoint for endpoint in self._find(expected)}
        self.names = sorted(self._endpoints)

    def __enter__(self) -> "Shards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels.values():
            channel.close()

    def _find(self, expected: int | None) -> list[Endpoint]:
        if not self._config.discover:
            found = list(self._config.endpoints)
            if expected not in (None, len(found)):
                raise Unavailable(f"--shards is {expected}, but {len(found)} are listed; list all shards")
            return found
        why = ""
        for _ in _tries():
            try:
                found, silent = run_loop(connection.find(self._config, ASK_SECONDS))
            except Unavailable as error:
                why = str(error)
                continue
            if not silent and expected in (None, len(found)):
                return found
            names = ", ".join(sorted(endpoint.name for endpoint in found))
            why = f"{silent[0].address} does not answer" if silent else f"{len(found)} were found ({names})"
            if expected is not None:
                why = f"--shards is {expected}, but {why}"
        raise Unavailable(f"{why}; wait until all shards are up")

    def owner(self, problem: Problem) -> str:
        """Returns the name of the shard that owns a problem, as every client computes it."""
        return self.names[placement.place(placement.problem_digest(*problem), self.names)]

    def stream(self, name: str, request: pb.ExportRequest) -> tuple[Any, pb.ExportStart]:
        """Starts an export of a shard. Returns the call and its first message. Raises ShardsError."""

        def begin(stub: rpc.DraftServiceStub) -> tuple[Any, pb.ExportStart]:
            call = stub.Export(request, metadata=metadata(self._config))
            return call, next(iter(call)).start

        return self._patiently(name, "Export", begin)

    def call(self, name: str, method: str, request: Any, timeout: float) -> Any:
        """Returns the answer of a shard. Retries for PATIENCE seconds. Raises ShardsError."""
        return self._patiently(
            name,
            method,
            lambda stub: getattr(stub, method)(request, timeout=timeout, metadata=metadata(self._config)),
        )

    def _patiently(self, name: str, method: str, work: Callable[[rpc.DraftServiceStub], T]) -> T:
        reported = False
        for _ in _tries():
            try:
                return work(rpc.DraftServiceStub(self._channel(name)))
            except grpc.RpcError as error:
                failure = error
            except ClientError as error:  # such as a missing token file
                raise ShardsError(str(error)) from None
            if failure.code() not in LATER:
                break
            if not reported:
                reported = True
                say(f"{failed(name, method, failure)}; trying again for {PATIENCE:g} s")
            self._look_again(name)
        raise failed(name, method, failure)

    def _channel(self, name: str) -> grpc.Channel:
        with self._lock:
            if name not in self._channels:
                self._channels[name] = open_channel(grpc, self._endpoints[name], self._config, PINGS)
            return self._channels[name]

    def _look_again(self, name: str) -> None:
        """Reconnects with the next call: a discovered shard may have a new address."""
        with self._lock:
            if channel := self._channels.pop(name, None):
                channel.close()
        if self._config.discover:
            with suppress(Unavailable):
                found, _ = asyncio.run(connection.find(self._config, ASK_SECONDS))
                self._endpoints |= {endpoint.name: endpoint for endpoint in found if endpoint.name in self._endpoints}


def _tries() -> Iterator[None]:
    """Yields once, and again after pauses, for PATIENCE seconds."""
    until = time.monotonic() + PATIENCE
    yield
    for pause in chain(PAUSES, repeat(PAUSES[-1])):
        if time.monotonic() + pause > until:
            return
        time.sleep(pause)
        yield


def failed(name: str, method: str, error: grpc.RpcError) -> ShardsError:
    """Returns the error for a failed call."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ShardsError(f"{name} does not know the method {method}; upgrade the server")
    return ShardsError(str(from_status(error.code(), error.details(), f"{method} on {name}")))
