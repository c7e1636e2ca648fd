"""The HTTP side: metrics for Prometheus, health for whoever restarts or routes, the status page for people."""

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from histospec.server.metrics import Metrics

# What must hold before the server is ready, and for each part what it is waiting for ("" when it holds).
Readiness = Callable[[], Mapping[str, str]]

PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css")} | {
    f"/{name}": (name, "text/javascript") for name in ("page.js", "charts.js", "words.js")
}
# The page is made of what strangers named: it runs its own scripts alone, and talks to nobody else.
GUARD = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def application(
    metrics: Metrics,
    readiness: Readiness,
    about: Mapping[str, str],
    overview: Callable[[], Mapping[str, Any]],
    troubles: Readiness = dict,
) -> web.Application:
    """An aiohttp application of read-only pages.

    `/livez` says that the event loop turns; `/readyz` answers 503 until every part holds; `/healthz` shows both for
    people, and always answers 200. `/` is the status page, which shows what `/status` says.
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
                "parts": {part: why or troubles().get(part) or "ok" for part, why in parts.items()},
            }
        )

    async def status(request: web.Request) -> web.Response:
        response = web.json_response(overview(), headers=GUARD)
        response.enable_compression()
        return response

    async def page(request: web.Request) -> web.Response:
        text, content_type = files[request.path]
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=GUARD)

    folder = resources.files("histospec.server") / "page"
    files = {path: ((folder / name).read_text("utf-8"), kind) for path, (name, kind) in PAGE.items()}
    app = web.Application()
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
