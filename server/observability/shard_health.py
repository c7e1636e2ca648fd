"""The health of the other shards: checked in the background, and only while `/status` is being read."""

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from histospec.protocol.names import DRAFT_SERVICE
from histospec.server.security.watched_files import read_bytes
from histospec.server.settings.addresses import ShardAddress
from histospec.server.settings.config import Config

EVERY = 10.0  # seconds
TIMEOUT = 2.0
SERVING = "SERVING"
UNKNOWN = "not asked yet"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]  # shards are on the local network
UNVERIFIED = "its certificate cannot be verified from here"


async def health(channel: grpc.aio.Channel, timeout: float) -> str:
    """Returns SERVING, or what else the shard at the end of this channel reports."""
    try:
        request = health_pb2.HealthCheckRequest(service=DRAFT_SERVICE)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if "CERTIFICATE_VERIFY_FAILED" in (error.details() or ""):
            return UNVERIFIED
        return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


class ShardHealth:
    """The health of the other shards, by name."""

    def __init__(self, peers: Sequence[ShardAddress], config: Config) -> None:
        self._peers = peers
        self._config = config
        self._states: dict[str, str] = {}
        self._asked = -EVERY
        self._asking: asyncio.Task[None] | None = None

    def states(self) -> dict[str, str]:
        """Returns the last known health. Never waits; starts new checks if the last ones are old."""
        if self._peers and self._asking is None and time.monotonic() - self._asked >= EVERY:
            self._asking = asyncio.ensure_future(self._ask())
        return {peer.name: self._states.get(peer.name, UNKNOWN) for peer in self._peers}

    async def _ask(self) -> None:
        try:
            answers = await asyncio.gather(*(self._health(peer) for peer in self._peers))
            self._states = {peer.name: answer for peer, answer in zip(self._peers, answers, strict=True)}
        finally:
            self._asked = time.monotonic()
            self._asking = None

    async def _health(self, peer: ShardAddress) -> str:
        try:
            async with self._channel(peer) as channel:
                return await health(channel, TIMEOUT)
        except OSError as error:  # the certificate cannot be read now
            return f"tls: {error}"

    def _channel(self, peer: ShardAddress) -> grpc.aio.Channel:
        """Returns a channel that shows this server's own certificate, if it has one. Raises OSError."""
        config = self._config
        if config.tls_cert is None or config.tls_key is None:
            return grpc.aio.insecure_channel(str(peer.address), options=OPTIONS)
        authorities = None if config.tls_client_ca is None else read_bytes(config.tls_client_ca)  # None: the system's
        own = grpc.ssl_channel_credentials(authorities, read_bytes(config.tls_key), read_bytes(config.tls_cert))
        return grpc.aio.secure_channel(str(peer.address), own, options=OPTIONS)

    def stop(self) -> None:
        """Stops all checks."""
        if self._asking is not None:
            self._asking.cancel()
