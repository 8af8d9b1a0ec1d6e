"""Decides who may see the pages: tokens, cookies and addresses."""

import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from flows import http_server
from flows.pages.browse.frame import HEADERS
from flows.pages.rendering import render

_MOST_OF_ADDRESS = 16_000  # characters
_MOST_AT_ONCE = 32  # requests answered at a time; fewer than threads, so that no request waits for a thread
_KEY_LENGTH = 32  # bytes of a token
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_HTTP = 80  # the port that browsers leave out of an address


@dataclass(frozen=True)
class Door:
    """The address of the pages, and the token that a reader needs to see them."""

    host: str
    port: int
    token: str | None
    is_loopback: bool

    @property
    def names(self) -> frozenset[str]:
        """The host headers that a browser on this machine sends to this server."""
        names = http_server.local_names(self.host)
        return frozenset(f"{name}:{self.port}" for name in names) | frozenset(names if self.port == _HTTP else ())

    @property
    def cookie(self) -> str:
        return f"tba-browse-{self.port}"  # browsers do not tell ports apart

    @property
    def address(self) -> str:
        everywhere = self.host in ("0.0.0.0", "::")
        name = socket.gethostname() if everywhere else http_server.in_url(self.host)
        return f"http://{name}:{self.port}/" + (f"?{urlencode({'token': self.token})}" if self.token else "")


def open_door(host: str, port: int, *, with_token: bool) -> tuple[socket.socket, Door]:
    """Return a listening socket, and its `Door`. The door has a token if `with_token` is set or if readers on other
    machines can reach the socket."""
    listening = http_server.listen(host, port, host_option="--host", port_option="--port")
    is_loopback = http_server.is_loopback(listening)
    token = secrets.token_urlsafe(_KEY_LENGTH) if with_token or not is_loopback else None
    return listening, Door(host, listening.getsockname()[1], token, is_loopback)


class Guard:
    """Stands before every page: refuses readers who may not see it, and adds the headers that keep a browser safe."""

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
        """Return a refusal if too many requests are being answered, else None. Only requests of readers who may see the
        pages are counted."""
        if self._answering < _MOST_AT_ONCE:
            return None
        return _refuse("There are too many requests at once. Try again in a moment.", 503)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that must not reach the pages, or None if the request may reach them."""
        if request.method not in ("GET", "HEAD"):
            return _refuse("These pages can only be read: use GET or HEAD.", 405, allow="GET, HEAD")
        if len(str(request.url)) > _MOST_OF_ADDRESS:
            return _refuse("The address is too long.", 414)
        if self.door.is_loopback and request.headers.get("host", "").lower() not in self.door.names:
            return _refuse(
                f"These pages answer only at 127.0.0.1:{self.door.port} and localhost:{self.door.port}. With ssh -L, "
                "use the same port on both sides.",
                421,
            )
        if is_foreign(request) and (
            request.headers.get("sec-fetch-mode") != "navigate" or request.url.path == "/refresh"
        ):
            return _refuse("Another site asked for this page.", 403)
        return self._without_token(request)

    def _without_token(self, request: Request) -> Response | None:
        """Return None if no token is needed or the request has the token as a cookie. If the address has the token,
        return a page that sets the cookie. Otherwise return a refusal."""
        if self.door.token is None:
            return None
        given = dict(parse_qsl(request.url.query, errors="replace"))
        if _same(given.pop("token", ""), self.door.token):
            return self._let_in(request.url.path, given)
        if _same(_cookies(request).get(self.door.cookie, ""), self.door.token):
            return None
        return _refuse(
            "The token is missing. Open the address that tba browse printed: the address has the token.", 403
        )

    def _let_in(self, path: str, given: dict[str, str]) -> Response:
        """Return a page that sets the cookie and then opens the requested page. A redirect is not possible: after a
        link on another site, the browser would count the redirect as coming from that site, and would not send a strict
        cookie."""
        there = f"/{path.lstrip('/')}" + (f"?{urlencode(given)}" if given else "")
        response = HTMLResponse(render("browse/welcome.html", there=there))
        assert self.door.token
        response.set_cookie(self.door.cookie, self.door.token, httponly=True, samesite="strict")
        return response


def is_foreign(request: Request) -> bool:
    """True if another site asks for a page, for example by a link. Another port of this machine is another site."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), token.encode())


def _cookies(request: Request) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(request.headers.get("cookie", "")).items()}
    except CookieError:
        return {}


def _refuse(message: str, status: int, **headers: str) -> Response:
    return HTMLResponse(render("browse/refusal.html", message=message), status, headers)
