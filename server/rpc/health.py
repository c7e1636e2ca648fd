"""`grpc.health.v1.Health`: whether this server serves. It needs no token, so everything about it is bounded.

grpcio's own servicer holds a lock while it writes to watchers: one that does not read would stop all changes.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from histospec.server.errors import LimitExceeded
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.connections import peer_of

Status = pb.HealthCheckResponse

WATCHES, WATCHES_EACH = 256, 64
"""Watches at a time, in all and of one host."""
LONGEST_NAME = 256  # characters of a service's name


class Health(pb_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Health of some services. Used only on the event loop."""

    def __init__(self, answering: Answering, metrics: Metrics) -> None:
        self._answering = answering
        self._limited = metrics.caller_limits.labels("calls")
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._watches: Counter[str] = Counter()  # by host

    def set(self, services: Iterable[str], serving: bool) -> None:
        """Sets the health of services. Never waits for watchers."""
        self._serving.update(dict.fromkeys(services, serving))
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        serving = self._serving.get(service)
        if serving is None:
            return int(Status.SERVICE_UNKNOWN)
        return int(Status.SERVING if serving else Status.NOT_SERVING)

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        if request.service not in self._serving:
            text = f"service: this server has no {request.service[:LONGEST_NAME]!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return Status(status=self._status(request.service))

    async def List(self, request: Any, context: Any) -> Any:
        return pb.HealthListResponse(statuses={name: Status(status=self._status(name)) for name in self._serving})

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> None:
        if len(request.service) > LONGEST_NAME:
            text = f"service: its name has {len(request.service)} characters; at most {LONGEST_NAME} are allowed"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        host = peer_of(context.peer()).rpartition(":")[0]
        if self._watches[host] >= WATCHES_EACH or self._watches.total() >= WATCHES:
            self._limited.inc()
            text = f"{self._watches[host]} watches of this host, of {self._watches.total()} in all, are open"
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{text}; the limits are {WATCHES_EACH} and {WATCHES}; use Check"
            )
        self._watches[host] += 1
        try:
            await self._watch(request.service, context)
        except LimitExceeded as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            self._watches[host] -= 1
            if not self._watches[host]:
                del self._watches[host]

    async def _watch(self, service: str, context: Any) -> None:
        told = None
        while True:
            changed, status = self._changed, self._status(service)
            if status != told:
                told = status
                await self._answering.write(context, Status(status=status).SerializeToString())
            await changed.wait()
