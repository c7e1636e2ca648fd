"""The lifecycle of a server: start, serve, drain and stop. Only this file knows all of it."""

import asyncio
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata

import grpc
import grpc.aio
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from histospec.native import Engine
from histospec.protocol.names import DRAFT_SERVICE
from histospec.server import machine
from histospec.server.errors import ConfigError, HistoSpecError, reason
from histospec.server.history.history import History
from histospec.server.history.tenants import Tenants
from histospec.server.logs import lines as logs
from histospec.server.logs.output import drain as drain_log
from histospec.server.logs.output import log_output
from histospec.server.observability.host_names import HostNames
from histospec.server.observability.metrics import Metrics
from histospec.server.observability.overview import Overview
from histospec.server.observability.traces import open_traces
from histospec.server.observability.vitals import Vitals
from histospec.server.observability.web import Web, application, most_connections
from histospec.server.open_store import location_of, open_patiently
from histospec.server.process import ENDING, TOGETHER, ends
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.connections import Connections
from histospec.server.rpc.governor import Governor
from histospec.server.rpc.health import Health
from histospec.server.rpc.interceptors import SPECRL, Accounting
from histospec.server.rpc.service import DraftService
from histospec.server.rpc.specrl import RolloutCacheService
from histospec.server.security.access import Access
from histospec.server.security.tls import Certificates
from histospec.server.settings import options
from histospec.server.settings.addresses import Address, ShardAddress
from histospec.server.settings.budget import check_budget
from histospec.server.settings.config import Config
from histospec.server.stores.opening import GivenUp, OpeningStore
from histospec.specrl import rollout_cache_pb2_grpc as specrl_grpc
from histospec.v1 import draft_pb2_grpc as pb_grpc

log = structlog.get_logger()

# After each call into the engine, a step waits for the GIL. A thread that runs Python code, such as a scrape, releases
# the GIL after this time, instead of Python's default of 5 ms.
SWITCH_SECONDS = 0.0002
OTHER_DESCRIPTORS = 128  # for the store, its readers, logs and health checks of peers; 30 were measured
MOST_CALLS = 1024  # at the same time on one connection; further ones wait at the client
MOST_CONNECTIONS = (1 << 31) - 1  # the largest number that gRPC takes
AT_ONCE_SECONDS = 0.5
"""If the store opens within this time, the server listens only then: it refuses no caller, and reports errors first."""
NEVER_SECONDS = 24 * 3600.0  # longer than any drain
HANG_UP_SECONDS = 3.0
"""For gRPC to end all calls once it is told to; then the server ends their connections itself."""
LAST_SECONDS = 30.0
"""For everything after a drain. Then the process ends, even if the store takes nothing."""


def main(argv: Sequence[str]) -> int:
    """Runs `histospec serve`. Returns 0 after a drain. Raises ConfigError if it cannot start as configured."""
    config = options.load(argv)
    sys.setswitchinterval(SWITCH_SECONDS)
    machine.keep_freed_memory()
    with log_output(config.log_format, config.log_level):
        try:
            return uvloop.run(serve(config))
        except HistoSpecError:
            raise
        except Exception:
            log.exception("the server failed")
            return 1


async def serve(config: Config) -> int:
    """Runs one server until a signal stops it. Returns the exit code."""
    server = Server(config)
    try:
        await server.start()
        await server.until_asked_to_stop()
        await server.drain()
    finally:
        await server.stop()
    if not server.closed:
        # gRPC's clean-up at the end of the interpreter would wait for its peers.
        drain_log()
        os._exit(0)
    return 0


class Server:
    """One shard: sockets, engine, store and the tasks between them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._descriptors = machine.raise_descriptor_limit()
        for flag, address in (("--listen", config.listen), ("--http", config.http)):
            _check_free(flag, address)
        access = Access(config.tokens)
        certificates = None
        if config.tls_cert is not None and config.tls_key is not None:
            certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._credentials = certificates.credentials() if certificates else None
        location = location_of(config)
        self._watched = [file for file in (access.file, certificates and certificates.files, location) if file]
        if config.tokens is not None and certificates is None and not config.listen.is_loopback:
            log.warning("tokens travel in the clear: give --tls-cert and --tls-key", listen=str(config.listen))
        self._name = config.shard_name or str(config.listen)
        self._traces = open_traces(config.traces, self._name)
        if warning := check_budget(
            config.memory, "memory" in config.model_fields_set, machine.group_memory_limit(), machine.memory_limit()
        ):
            log.warning(warning)
        self._store = store = OpeningStore(partial(open_patiently, config, self._name, location))
        self._threads = config.threads or machine.drafting_threads(machine.cpu_limit())
        engine = Engine(
            config.memory,
            history_epochs=config.history_epochs,
            threads=self._threads,
            namespace_tokens=config.namespace_tokens,
            history_responses=config.history_responses,
        )
        self._history = History(engine, store, config.max_namespaces, Tenants(access, engine))
        self._metrics = Metrics(engine, self._history.counts)
        self._metrics.registry.register(
            Vitals(config, store, certificates, self._watched, self._history.tenants, self._ready)
        )
        self._connections = Connections()
        self._answering = Answering(self._connections, self._metrics)
        self._service = DraftService(engine, self._history, self._metrics, config, access, self._answering)
        serves_specrl = bool(config.specrl_namespace)
        self._specrl = RolloutCacheService(self._history, config, access, self._metrics) if serves_specrl else None
        self._services = [DRAFT_SERVICE] if self._specrl is None else [DRAFT_SERVICE, SPECRL.full_name]
        self._health = Health(self._answering, self._metrics)
        self._accounting = Accounting(self._metrics, config, access, self._answering, self._traces)
        arrivals = (
            self._accounting.arrivals if self._specrl is None else [*self._accounting.arrivals, self._specrl.arrivals]
        )
        self._governor = Governor(
            self._connections, self._service.streams, arrivals,
            lambda: engine.memory_bytes() + self._history.waiting_bytes, config.max_message, self._metrics,
        )  # fmt: skip
        self._governing: asyncio.Task[None] | None = None
        self._grpc = grpc.aio.server(
            interceptors=[self._accounting],
            options=[
                ("grpc.so_reuseport", 0),  # otherwise a leftover server silently shares the port
                ("grpc.max_receive_message_length", config.max_message),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", MOST_CALLS),
                # Otherwise gRPC buffers megabytes of a call before the handler reads them.
                ("grpc.http2.bdp_probe", 0),
                # One thread reads all connections. A megabyte of one would delay the steps of others.
                ("grpc.experimental.tcp_max_read_chunk_size", 64 << 10),
                # If a worker's machine vanishes, its pings fail, and the server ends its stream and sessions.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # otherwise a ping may take 60 seconds
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                # Close idle connections, and keep descriptors free for HTTP and the store. A worker's stream is a call,
                # so its connection is never idle.
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_connection_idle_ms", 600_000),
                ("grpc.max_allowed_incoming_connections", _connections(self._descriptors)),
            ],
        )
        self._overview: Overview | None = None
        # One thread computes everything for observers, so they take at most one thread's share of the GIL.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._web: Web | None = None
        self._loading: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._hung_up = -math.inf
        self._deadline: threading.Timer | None = None
        self.closed = False
        """Whether gRPC has ended all calls and connections."""

    async def start(self) -> None:
        """Listens while the store opens, then becomes ready and loads the store in the background.

        Raises ConfigError.
        """
        config = self._config
        loop = asyncio.get_running_loop()
        for number in filter(ends, ENDING):
            loop.add_signal_handler(number, self._signalled, number)
        opening = asyncio.create_task(self._open())
        await asyncio.wait((opening,), timeout=AT_ONCE_SECONDS)
        if opening.done():
            opening.result()

        pb_grpc.add_DraftServiceServicer_to_server(self._service, self._grpc)
        if self._specrl is not None:
            specrl_grpc.add_RolloutCacheServiceServicer_to_server(self._specrl, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        self._serving(False)
        try:
            listen = config.listen._replace(port=self._open_port())
        except RuntimeError as error:
            raise ConfigError(f"--listen: cannot listen on {config.listen} ({error}); give another address") from None
        self._connections.port = listen.port
        shard = ShardAddress(config.shard_name or str(listen), listen)  # `listen` has the real port if 0 was given
        self._service.name = shard.name
        self._service.shards = list(config.peers)
        if shard.name not in {peer.name for peer in config.peers}:
            self._service.shards.append(shard)
            self._service.listening = shard

        about = {"shard": shard.name, "version": metadata.version("histospec")}
        self._overview = Overview(
            config, self._metrics, self._readiness, shard, about, logs.RECENT, self._watched, self._store,
            self._history.epochs.progress, self._history.tenants, self._accounting.rejections, self._aside,
        )  # fmt: skip
        self._overview.start()
        pages = application(self._metrics, self._readiness, about, self._overview.show, self._aside, self._troubles)
        pages.middlewares.append(HostNames.of(config).check)
        self._web = Web(pages, self._metrics, self._descriptors)
        try:
            http = config.http._replace(port=await self._web.start(config.http.host, config.http.port))
        except OSError as error:
            raise ConfigError(f"--http: cannot listen on {config.http} ({error}); give another address") from None
        await self._grpc.start()
        self._governing = asyncio.create_task(self._governor.run())
        log.info(
            "listening",
            grpc=str(listen),
            http=str(http),
            data_dir=str(config.data_dir.resolve()),
            threads=self._threads,
            descriptors=self._descriptors,
            **about,
        )
        self._loading = asyncio.create_task(self._load(opening))
        gc.collect()
        gc.freeze()  # garbage collection skips long-lived objects: walking them would stop all steps for 60 to 120 ms

    def _open_port(self) -> int:
        if self._credentials is None:
            return self._grpc.add_insecure_port(str(self._config.listen))
        return self._grpc.add_secure_port(str(self._config.listen), self._credentials)

    async def _open(self) -> bool:
        """Opens the store. Returns False if the server stops before the store is open. Raises ConfigError."""
        try:
            newest = await asyncio.wrap_future(self._store.start())
        except GivenUp:
            return False
        await self._history.open(newest)
        return True

    async def _load(self, opening: "asyncio.Task[bool]") -> None:
        if not await opening:
            return
        await self._history.load()
        if not self._stopping.is_set():
            self._serving(True)

    async def until_asked_to_stop(self) -> None:
        """Returns when a signal arrives. Raises ConfigError or StoreError if the store cannot be opened."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        assert self._loading is not None
        await asyncio.wait((stopping, self._loading), return_when=asyncio.FIRST_COMPLETED)
        if self._loading.done():
            self._loading.result()
        await stopping

    async def drain(self) -> None:
        """Refuses new calls and gives open streams up to `drain_seconds` to end."""
        log.info("draining", seconds=self._config.drain_seconds)
        self._history.loading.give_up()
        self._serving(False)
        # Refuse new calls from here on. gRPC gets a longer grace period, because only the code below may cut streams
        # off: if both did so at the same time, the process would crash.
        stopped = asyncio.ensure_future(self._grpc.stop(self._config.drain_seconds + NEVER_SECONDS))
        self._service.drain()
        try:
            await asyncio.wait_for(self._accounting.idle(), self._config.drain_seconds)
        except asyncio.TimeoutError:
            log.warning("streams are cut off: they were still open after --drain-seconds")
        await self._hang_up()
        if self.closed:
            await stopped

    async def _hang_up(self) -> None:
        """Ends all calls and connections. gRPC waits for peers to take what it writes; this does not."""
        for _ in range(2):
            if self.closed:
                return
            stopping = asyncio.ensure_future(self._grpc.stop(None))
            self.closed = bool((await asyncio.wait((stopping,), timeout=HANG_UP_SECONDS))[0])
            if not self.closed:
                ended = await self._connections.hang_up()
                log.warning("connections ended: their peers take nothing", connections=ended)

    async def stop(self) -> None:
        """Closes everything. Afterwards, all that the store accepted is on disk."""
        await self._hang_up()
        if self._governing is not None:
            self._governing.cancel()
        await self._history.close()
        if self._overview is not None:
            self._overview.stop()
        if self._web is not None:
            await self._web.stop()
        self._aside.shutdown(wait=False, cancel_futures=True)
        if self._traces is not None:
            await self._traces.close()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._loading is not None:
            log.info("stopped")

    def _signalled(self, number: int) -> None:
        hung_up, now = self._hung_up, time.monotonic()
        if number == signal.SIGHUP:
            self._hung_up = now
        if self._stopping.is_set():
            if number == signal.SIGHUP and now - hung_up < TOGETHER:
                return  # a terminal that closes sends SIGHUP twice
            # Safe: acknowledged responses are on disk, and the store survives any kind of exit.
            log.warning("stopping at once", signal=signal.Signals(number).name)
            drain_log()
            os._exit(1)
        self._stopping.set()
        self._deadline = _end_within(self._config.drain_seconds + LAST_SECONDS)

    def _readiness(self) -> dict[str, str]:
        return {
            "store": self._store.opening or ("" if self._history.loading.ready else self._history.loading.progress),
            "drain": "draining" if self._stopping.is_set() else "",
        }

    def _troubles(self) -> dict[str, str]:
        """Returns the parts that do not work fully. The server still drafts, so it stays ready."""
        loading = self._history.loading
        return {
            "store": self._store.trouble or self._store.outage or ("" if loading.done.is_set() else loading.progress)
        }

    def _ready(self) -> bool:
        return not any(self._readiness().values())

    def _serving(self, ready: bool) -> None:
        self._health.set(("", *self._services), ready)


def _end_within(seconds: float) -> threading.Timer:
    """Ends the process after `seconds`, whatever it waits for, unless cancelled. Acknowledged responses are on disk."""

    def end() -> None:
        log.error("the server did not end in time after a signal: ending at once", seconds=seconds)
        drain_log()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def _connections(descriptors: int) -> int:
    """Returns how many connections gRPC may have if the process may open `descriptors` files and sockets."""
    return min(max(1, descriptors - most_connections(descriptors) - OTHER_DESCRIPTORS), MOST_CONNECTIONS)


def _check_free(flag: str, address: Address) -> None:
    """Raises ConfigError with the reason if the server cannot listen on this address; gRPC would only log it."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot listen on {address} ({reason(error)}); give another address") from None
