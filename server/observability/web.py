"""The HTTP port: metrics for Prometheus, health for probes and load balancers, and the status page."""

import asyncio
import gzip
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from importlib import resources
from typing import Any, Generic, NamedTuple, TypeVar

import structlog
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from histospec.server.logs.lines import Throttle
from histospec.server.observability.connections import MAX_CONNECTIONS, SECONDS, Connections
from histospec.server.observability.metrics import Metrics

log = structlog.get_logger()
T = TypeVar("T")

OPEN_METRICS = "application/openmetrics-text"

# The conditions of readiness: for each part, what it waits for ("" if it is ready).
Readiness = Callable[[], Mapping[str, str]]

PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css")} | {
    f"/{name}": (name, "text/javascript")
    for name in ("page.js", "charts.js", "axes.js", "words.js", "tables.js", "elements.js")
}
# The page shows names that strangers chose: it may run only its own scripts and connect only to this server.
GUARD = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

# aiohttp would log a traceback for each malformed request; the answer to the peer already says what is wrong.
QUIET = logging.getLogger("histospec.server.observability.web")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


class OnceASecond(Generic[T]):
    """Computes a value at most once a second.

    The callers of one second share a computation that starts after they asked, so each caller sees the effects of its
    earlier calls. A caller waits up to a second for the start.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]], seconds: float = 1.0) -> None:
        self._compute = compute
        self._seconds = seconds
        self._began = float("-inf")  # start of the last computation, by the loop's clock
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # not started to compute

    async def __call__(self) -> T:
        """Returns the value. Raises what the computation raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._in_turn())
            self._next.add_done_callback(_retrieve)
        return await asyncio.shield(self._next)

    async def _in_turn(self) -> T:
        clock = asyncio.get_running_loop().time
        async with self._turn:
            await asyncio.sleep(self._began + self._seconds - clock())
            self._next = None
            self._began = clock()
            return await self._compute()


def _retrieve(task: "asyncio.Task[T]") -> None:
    """Retrieves an error that no caller waits for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def most_connections(descriptors: int) -> int:
    """Returns how many HTTP connections are allowed if the process may open `descriptors` files and sockets."""
    return min(MAX_CONNECTIONS, descriptors // 4)


class Web:
    """The HTTP port: aiohttp's server behind bounded connections.

    Args:
        pages: the application that answers; see `application`.
        metrics: counts closed connections.
        descriptors: limit of the process; HTTP uses at most a quarter of them.
        seconds: maximum duration of each stage of a connection.

    """

    def __init__(
        self,
        pages: web.Application,
        metrics: Metrics,
        descriptors: int,
        seconds: Mapping[str, float] = SECONDS,
    ) -> None:
        self._runner = web.AppRunner(pages, access_log=None, logger=QUIET, lingering_time=1.0)
        self._pages = pages
        self._connections = Connections(
            self._protocol,
            lambda why: metrics.http_closed.labels(why).inc(),
            most_connections(descriptors),
            seconds,
        )
        metrics.http_connections.set_function(lambda: len(self._connections))
        self._listening: asyncio.Server | None = None

    def _protocol(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return self._runner.server()

    async def start(self, host: str, port: int) -> int:
        """Starts to listen. Returns the port. Raises OSError."""
        self._pages.middlewares.append(self._connections.watch)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connections, host, port, reuse_address=True, backlog=512)
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Closes all connections."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


def application(
    metrics: Metrics,
    readiness: Readiness,
    about: Mapping[str, str],
    overview: Callable[[], Awaitable[Mapping[str, Any]]],
    aside: Executor,
    troubles: Readiness = dict,
) -> web.Application:
    """Returns an aiohttp application of read-only pages.

    `/livez` shows that the event loop runs. `/readyz` answers 503 until every part is ready. `/healthz` shows both for
    people and always answers 200. `/` is the status page, which shows `/status`. Slow answers are computed in `aside`,
    once a second for all requests.
    """

    def aside_of_loop(compute: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(aside, compute)

    def exposition(accept: str) -> tuple[OnceASecond[Packed], str]:
        encode, content_type = choose_encoder(accept)
        text = partial(metrics.exposition, encode, accept == OPEN_METRICS)
        return OnceASecond(lambda: aside_of_loop(lambda: _packed(text()))), content_type

    expositions = {name: exposition(name) for name in (OPEN_METRICS, "")}

    async def summed_up() -> Packed:
        value = await overview()
        return await aside_of_loop(lambda: _packed(json.dumps(value).encode()))

    packed_status = OnceASecond(summed_up)

    async def show_metrics(request: web.Request) -> web.Response:
        accepted = request.headers.get("Accept", "")
        text, content_type = expositions[OPEN_METRICS if OPEN_METRICS in accepted else ""]
        return _answer(request, await text(), {"Content-Type": content_type})

    async def livez(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        waiting = {part: why for part, why in readiness().items() if why}
        if waiting:
            return web.Response(status=503, text="".join(f"{part}: {why}\n" for part, why in waiting.items()))
        return web.Response(text="ok\n")

    async def healthz(request: web.Request) -> web.Response:
        parts = readiness()
        return web.json_response(
            {
                **about,
                "ready": not any(parts.values()),
                "parts": {part: why or troubles().get(part) or "ok" for part, why in parts.items()},
            }
        )

    async def status(request: web.Request) -> web.Response:
        return _answer(request, await packed_status(), GUARD | {"Content-Type": "application/json; charset=utf-8"})

    async def page(request: web.Request) -> web.Response:
        text, content_type = files[request.path]
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=GUARD)

    folder = resources.files("histospec.server.observability") / "page"
    files = {path: ((folder / name).read_text("utf-8"), kind) for path, (name, kind) in PAGE.items()}
    app = web.Application(middlewares=[_reported])
    app.add_routes(
        [
            web.get("/metrics", show_metrics),
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/healthz", healthz),
            web.get("/status", status),
            *(web.get(path, page) for path in files),
        ]
    )
    return app


class Packed(NamedTuple):
    """One body, plain and compressed; requests share it."""

    plain: bytes
    gzipped: bytes


def _packed(plain: bytes) -> Packed:
    return Packed(plain, gzip.compress(plain, compresslevel=1))  # releases the GIL


def _answer(request: web.Request, body: Packed, headers: Mapping[str, str]) -> web.Response:
    headers = {**headers, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=body.gzipped, headers=headers | {"Content-Encoding": "gzip"})
    return web.Response(body=body.plain, headers=headers)


_throttle = Throttle()


@web.middleware
async def _reported(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        if (more := _throttle.admits("failed")) is not None:
            log.exception("http request failed", path=request.path, **more)
        return web.Response(status=500, text="the server failed; see its log\n")
