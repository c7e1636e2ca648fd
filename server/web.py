"""The HTTP side: metrics for Prometheus, health for whoever restarts or routes."""

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from histospec.server.metrics import Metrics

# What must hold before the server is ready, and for each part what it is waiting for ("" when it holds).
Readiness = Callable[[], Mapping[str, str]]


def application(metrics: Metrics, readiness: Readiness, about: Mapping[str, str]) -> web.Application:
    """An aiohttp application of four read-only pages.

    `/livez` says that the event loop turns; `/readyz` answers 503 until every part holds; `/healthz` shows both for
    people, and always answers 200.
    """

    async def show_metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

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
                "parts": {part: why or "ok" for part, why in parts.items()},
            }
        )

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", show_metrics),
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/healthz", healthz),
        ]
    )
    return app
