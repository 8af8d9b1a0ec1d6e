"""Answers scrapes by HTTP."""

import errno
import hmac
import ipaddress
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

from flows.metrics.exposition import PLAIN, encode
from flows.metrics.watched import Sample
from tba.errors import ConfigError

TOKEN = "TBA_METRICS_TOKEN"
"""The environment variable with the token that a scraper must send. Without it, no token is needed."""

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def listen(host: str, port: int) -> socket.socket:
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--listen: no machine is named {host!r}") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--listen: port {port} is in use; choose another port, or 0 for any free port") from None
        raise ConfigError(f"--listen: cannot listen on {host}:{port}: {error.strerror}") from None
    return listening


def has_token() -> bool:
    return bool(os.environ.get(TOKEN))


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def local_names(listening: socket.socket) -> list[str]:
    """Return how requests may name this machine; an empty list if every name will do."""
    address = listening.getsockname()[0]
    return [*LOCAL_NAMES, f"[{address}]" if ":" in address else address] if is_loopback(listening) else []


def serve(listening: socket.socket, scrape: Callable[[], list[Sample]]) -> None:
    """Answer scrapes until Ctrl-C."""
    config = uvicorn.Config(
        make_app(scrape, os.environ.get(TOKEN, ""), local_names(listening)),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=64,
        timeout_graceful_shutdown=2,
    )
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
    guard = [Middleware(TrustedHostMiddleware, allowed_hosts=names)] if names else []
    return Starlette(routes=routes, middleware=guard)


def _may_scrape(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return not token or hmac.compare_digest(given.encode(errors="replace"), f"Bearer {token}".encode())
