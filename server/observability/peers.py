"""Whether the other shards serve: asked in the background, and only while somebody looks."""

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from histospec.client.channel import open_channel
from histospec.client.config import Config as ClientConfig
from histospec.client.config import Endpoint, Tls
from histospec.client.errors import HistoSpecError as ClientError
from histospec.server.config import Config, Peer
from histospec.server.rpc.interceptors import SERVICE

EVERY = 10.0  # seconds
TIMEOUT = 2.0
SERVING = "SERVING"
UNKNOWN = "not asked yet"
UNVERIFIED = "its certificate cannot be verified from here"


async def health(endpoint: Endpoint, config: ClientConfig, timeout: float) -> str:
    """SERVING, or what else is the case."""
    try:
        async with open_channel(grpc.aio, endpoint, config) as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if "CERTIFICATE_VERIFY_FAILED" in (error.details() or ""):
            return UNVERIFIED
        return f"{error.code().name}: {error.details()}"
    except ClientError as error:
        return str(error)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


class Peers:
    """The shards beside this one, by name."""

    def __init__(self, peers: Sequence[Peer], config: Config) -> None:
        self._peers = peers
        tls = None
        if config.tls_cert is not None:
            files = (config.tls_client_ca, config.tls_cert, config.tls_key)
            tls = Tls(*(None if path is None else str(path) for path in files))
        self._config = ClientConfig(endpoints=(), namespace="", tls=tls)
        self._states: dict[str, str] = {}
        self._asked = -EVERY
        self._asking: asyncio.Task[None] | None = None

    def states(self) -> dict[str, str]:
        """What each said when it was asked last. Never waits; asks again where that was a while ago."""
        if self._peers and self._asking is None and time.monotonic() - self._asked >= EVERY:
            self._asking = asyncio.ensure_future(self._ask())
        return {peer.name: self._states.get(peer.name, UNKNOWN) for peer in self._peers}

    async def _ask(self) -> None:
        try:
            ends = [Endpoint(peer.name, str(peer.address)) for peer in self._peers]
            answers = await asyncio.gather(*(health(end, self._config, TIMEOUT) for end in ends))
            self._states = {end.name: answer for end, answer in zip(ends, answers, strict=True)}
        finally:
            self._asked = time.monotonic()
            self._asking = None

    def stop(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            self._asking.cancel()
