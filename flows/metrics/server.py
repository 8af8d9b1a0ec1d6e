"""Answers scrapes by HTTP."""

import hmac
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from flows import http_server
from flows.http_server import is_loopback
from flows.metrics.exposition import PLAIN, encode
from flows.metrics.watched import Sample

TOKEN = "TBA_METRICS_TOKEN"
"""The environment variable with the token that a scraper must send. Without it, no token is needed."""


def has_token() -> bool:
    return bool(os.environ.get(TOKEN))


def local_names(listening: socket.socket) -> Sequence[str]:
    """Return how requests may name this machine; nothing if every name will do."""
    return http_server.local_names(listening.getsockname()[0]) if is_loopback(listening) else ()


def serve(listening: socket.socket, scrape: Callable[[], list[Sample]]) -> None:
    """Answer scrapes until Ctrl-C."""
    app = make_app(scrape, os.environ.get(TOKEN, ""), local_names(listening))
    config = http_server.settings(app, limit_concurrency=64)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def make_app(scrape: Callable[[], list[Sample]], token: str = "", names: Sequence[str] = ()) -> Starlette:
    """Return the application: `/metrics` has the metrics, and `/healthy` tells that the process is alive. If
    `names` are given, requests must name this machine by one of them, so that a site whose DNS leads here reads
    nothing."""

    def metrics(request: Request) -> Response:
        if not _may_scrape(request, token):
            return PlainTextResponse(
                f"The header Authorization must be `Bearer TOKEN`, with the token of {TOKEN}.\n",
                401,
                {"WWW-Authenticate": "Bearer"},
            )
        text, kind = encode(scrape(), request.headers.get("accept", PLAIN))
        return Response(text, headers={"Content-Type": kind, "Cache-Control": "no-store"})

    def healthy(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [Route(path, answer, methods=["GET"]) for path, answer in (("/metrics", metrics), ("/healthy", healthy))]
    guard = [Middleware(TrustedHostMiddleware, allowed_hosts=list(names))] if names else []
    return Starlette(routes=routes, middleware=guard)


def _may_scrape(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return not token or hmac.compare_digest(given.encode(errors="replace"), f"Bearer {token}".encode())
