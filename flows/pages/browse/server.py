"""Who may look, and at which address what is. What answers is uvicorn, on loopback unless it is told otherwise."""

import errno
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from flows.escaping import line
from flows.pages.browse import overview, prompt, search, step, trajectory, version
from flows.pages.browse.components import HEADERS, bare, frame
from flows.pages.browse.connections import CrowdedServer, Limits
from flows.pages.browse.session import Look, Refused, TooLong
from flows.pages.browse.tokens import Tokens
from flows.queries.statements import explain
from storage.runs.run import Run
from tba.errors import ConfigError, QueryError, TBAError

_MOST_OF_ADDRESS = 16_000  # characters
_MOST_AT_ONCE = 32  # requests that are answered: fewer than there are threads, so that none waits for one
_GREATEST = 2**31  # of the numbers of steps, versions and shards
_KEY_LENGTH = 32  # bytes of a token

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


_HTTP = 80  # a port that browsers leave out


@dataclass(frozen=True)
class Door:
    """Where pages are offered, and what has to be shown to see them."""

    host: str
    port: int
    token: str | None
    is_loopback: bool

    @property
    def names(self) -> frozenset[str]:
        """What a browser on this machine calls it. Whatever else a request calls it was led here by somebody's DNS."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        names = ("127.0.0.1", "localhost", "[::1]", own.lower())
        return frozenset(f"{name}:{self.port}" for name in names) | frozenset(names if self.port == _HTTP else ())

    @property
    def cookie(self) -> str:
        return f"tba-browse-{self.port}"  # browsers do not tell ports apart

    @property
    def address(self) -> str:
        everywhere = self.host in ("0.0.0.0", "::")
        name = socket.gethostname() if everywhere else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/" + (f"?{urlencode({'token': self.token})}" if self.token else "")


def browse(run: Run, *, host: str, port: int, with_token: bool, seconds: float) -> int:
    """Offer a run's pages until Ctrl-C."""
    listening, door = open_door(host, port, with_token=with_token)
    with listening:
        look = Look(run, seconds)
        print(f"{run.name} at {door.address}   (Ctrl-C ends it)", flush=True)
        try:
            make_server(look, door).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            look.close()
    return 0


def open_door(host: str, port: int, *, with_token: bool) -> tuple[socket.socket, Door]:
    """A socket that listens. Beyond this machine nobody sees anything without the token."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host: {host!r} is the name of no machine") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port: {port} is in use; choose another, or 0 for any that is free") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port: {port} may not be opened by you; choose one from 1024 on") from None
        raise ConfigError(f"--host: {host} cannot be listened to: {error.strerror}") from None
    is_loopback = ipaddress.ip_address(address[0]).is_loopback
    token = secrets.token_urlsafe(_KEY_LENGTH) if with_token or not is_loopback else None
    return listening, Door(host, listening.getsockname()[1], token, is_loopback)


def make_server(look: Look, door: Door, limits: Limits | None = None) -> uvicorn.Server:
    config = uvicorn.Config(
        Guard(make_app(look), door),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return CrowdedServer(config, limits or Limits(), look.close)


class Guard:
    """Stands before every page: refuses who may not look, and adds to each answer what keeps a browser safe."""

    def __init__(self, app: App, door: Door):
        self.app = app
        self.door = door
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        if refusal := self.refusal(Request(scope)) or self._too_many():
            await refusal(scope, receive, guarded)
            return
        self._answering += 1
        try:
            await self.app(scope, receive, guarded)
        finally:
            self._answering -= 1

    def _too_many(self) -> Response | None:
        """Nobody without the token gets this far, or takes the place of who has it."""
        if self._answering < _MOST_AT_ONCE:
            return None
        return _told("Too many pages are being made at once; ask again in a moment.", 503)

    def refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _told("This is only for reading: GET and HEAD.", 405, allow="GET, HEAD")
        if len(str(request.url)) > _MOST_OF_ADDRESS:
            return _told("That address is too long.", 414)
        if self.door.is_loopback and request.headers.get("host", "").lower() not in self.door.names:
            return _told(
                f"Pages are offered as 127.0.0.1:{self.door.port} and localhost:{self.door.port} alone. Through "
                "ssh -L, take the same port on both sides.",
                421,
            )
        if _is_foreign(request) and (
            request.headers.get("sec-fetch-mode") != "navigate" or request.url.path == "/refresh"
        ):
            return _told("Another site asks for this.", 403)
        return self._without_token(request)

    def _without_token(self, request: Request) -> Response | None:
        """The token is shown once, in the address; from then on the browser keeps it, for this server alone."""
        if self.door.token is None:
            return None
        given = dict(parse_qsl(request.url.query, errors="replace"))
        if _same(given.pop("token", ""), self.door.token):
            return self._let_in(request.url.path, given)
        if _same(_cookies(request).get(self.door.cookie, ""), self.door.token):
            return None
        return _told("The address that tba browse printed has a token: open that one.", 403)

    def _let_in(self, path: str, given: dict[str, str]) -> Response:
        """By a page that goes on by itself: a redirection would come from the site whose link was followed, and a
        strict cookie is not sent along then."""
        there = f"/{path.lstrip('/')}" + (f"?{urlencode(given)}" if given else "")
        onwards = f"<p><a href='{escape(there)}'>go on</a></p>"
        response = HTMLResponse(
            bare("tba browse", onwards, f'<meta http-equiv="refresh" content="0;url={escape(there)}">')
        )
        assert self.door.token
        response.set_cookie(self.door.cookie, self.door.token, httponly=True, samesite="strict")
        return response


def _is_foreign(request: Request) -> bool:
    """Whether another site asks, by a link that is followed if at all: any other port of this machine is one too."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), token.encode())


def _cookies(request: Request) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(request.headers.get("cookie", "")).items()}
    except CookieError:
        return {}


def _told(message: str, status: int, **headers: str) -> Response:
    return HTMLResponse(
        bare("tba browse", f"<section class='words wrong'><p>{line(message, 2000)}</p></section>"), status, headers
    )


# --- which page is where ----------------------------------------------------------------------------------------------


def make_app(look: Look) -> App:
    tokens = Tokens(look.run)

    def number(request: Request, name: str) -> int:
        return _number(request.path_params[name])

    def given(request: Request) -> dict[str, str]:
        return dict(request.query_params)

    def refresh(request: Request) -> Response:
        look.refresh()
        to = request.query_params.get("to", "/")
        there = to if to.startswith("/") and not to.startswith(("//", "/\\", "/refresh")) else "/"
        return RedirectResponse(there, 303)

    def optional(request: Request) -> int | None:
        attempt = request.path_params.get("attempt", request.query_params.get("attempt"))
        return None if attempt is None else _number(attempt)

    pages: dict[str, Callable[[Request], str]] = {
        "/": lambda request: overview.page(look),
        "/steps": lambda request: overview.steps_page(look, _number(request.query_params.get("page", "0"))),
        "/trajectories": lambda request: search.page(look, given(request), foreign=_is_foreign(request)),
        "/sql": lambda request: search.sql_page(look, given(request), foreign=_is_foreign(request)),
        "/step/{step}": lambda request: step.page(look, number(request, "step"), optional(request)),
        "/version/{version}": lambda request: version.page(look, number(request, "version"), optional(request)),
        "/version/{version}/{attempt}": lambda request: version.page(
            look, number(request, "version"), optional(request)
        ),
        "/prompt": lambda request: prompt.page(look, request.query_params.get("id", "").replace("\0", "")),
        "/trajectory/{searcher}/{seq}/{row}": lambda request: trajectory.page(
            look, tokens, *(number(request, name) for name in ("searcher", "seq", "row"))
        ),
    }
    routes = [Route(path, partial(_answer, make), methods=["GET"]) for path, make in pages.items()]
    wrong = partial(_wrong, look)
    kinds = (HTTPException, TBAError, Exception)
    return Starlette(
        routes=[*routes, Route("/refresh", refresh, methods=["GET"])], exception_handlers=dict.fromkeys(kinds, wrong)
    )


def _answer(make: Callable[[Request], str], request: Request) -> Response:
    return HTMLResponse(make(request).encode(errors="replace"))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) < _GREATEST):
        raise Refused("there is no page of this name")
    return int(text)


def _wrong(look: Look, request: Request, error: Exception) -> Response:
    """A page that says what is wrong. Of what nobody foresaw the terminal has the traceback."""
    if isinstance(error, TooLong):
        status, said = 503, str(error)
    elif isinstance(error, Refused):
        status, said = 404, str(error)
    elif isinstance(error, HTTPException):
        status, said = error.status_code, "there is no page of this name" if error.status_code == 404 else error.detail
    elif isinstance(error, QueryError):
        status, said = 500, explain(error)
    elif isinstance(error, TBAError):
        status, said = 502, str(error)
    else:
        status, said = 500, f"{type(error).__name__}; the terminal of tba browse says more"
    body = f"<h1>That does not go</h1><section class='words wrong'><p>{line(said, 2000)}</p></section>"
    return HTMLResponse(frame(look, request.url.path, "error", [body]).encode(errors="replace"), status)
