"""The server of the pages: which page is at which address. It is uvicorn, and listens on loopback by default."""

from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from flows import http_server
from flows.pages.browse import overview, prompt, search, step, trajectory, version
from flows.pages.browse.connections import CrowdedServer, Limits
from flows.pages.browse.frame import show
from flows.pages.browse.guard import App, Door, Guard, is_foreign, open_door
from flows.pages.browse.response import Tokens
from flows.pages.browse.run_snapshot import Refused, RunSnapshot, TooLong
from flows.queries.statements import explain
from storage.runs.run import Run
from tba.errors import QueryError, TBAError

_GREATEST = 2**31  # numbers of steps, versions and shards are smaller
_NO_PAGE = "there is no page at this address"


def browse(run: Run, *, host: str, port: int, with_token: bool, seconds: float) -> int:
    """Serve a run's pages until Ctrl-C."""
    listening, door = open_door(host, port, with_token=with_token)
    with listening:
        snapshot = RunSnapshot(run, seconds)
        print(f"{run.name} at {door.address}   (Ctrl-C ends it)", flush=True)
        try:
            make_server(snapshot, door).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            snapshot.close()
    return 0


def make_server(snapshot: RunSnapshot, door: Door, limits: Limits | None = None) -> uvicorn.Server:
    config = http_server.settings(Guard(make_app(snapshot), door))
    return CrowdedServer(config, limits or Limits(), snapshot.close)


# --- which page is where ----------------------------------------------------------------------------------------------


def make_app(snapshot: RunSnapshot) -> App:
    tokens = Tokens(snapshot.run)

    def number(request: Request, name: str) -> int:
        return _number(request.path_params[name])

    def given(request: Request) -> dict[str, str]:
        return dict(request.query_params)

    def refresh(request: Request) -> Response:
        snapshot.refresh()
        to = request.query_params.get("to", "/")
        there = to if to.startswith("/") and not to.startswith(("//", "/\\", "/refresh")) else "/"
        return RedirectResponse(there, 303)

    def optional(request: Request) -> int | None:
        attempt = request.path_params.get("attempt", request.query_params.get("attempt"))
        return None if attempt is None else _number(attempt)

    pages: dict[str, Callable[[Request], str]] = {
        "/": lambda request: overview.page(snapshot),
        "/steps": lambda request: overview.steps_page(snapshot, _number(request.query_params.get("page", "0"))),
        "/trajectories": lambda request: search.page(snapshot, given(request), foreign=is_foreign(request)),
        "/sql": lambda request: search.sql_page(snapshot, given(request), foreign=is_foreign(request)),
        "/step/{step}": lambda request: step.page(snapshot, number(request, "step"), optional(request)),
        "/version/{version}": lambda request: version.page(snapshot, number(request, "version"), optional(request)),
        "/version/{version}/{attempt}": lambda request: version.page(
            snapshot, number(request, "version"), optional(request)
        ),
        "/prompt": lambda request: prompt.page(snapshot, request.query_params.get("id", "").replace("\0", "")),
        "/trajectory/{searcher}/{seq}/{row}": lambda request: trajectory.page(
            snapshot, tokens, *(number(request, name) for name in ("searcher", "seq", "row"))
        ),
    }
    routes = [Route(path, partial(_answer, make), methods=["GET"]) for path, make in pages.items()]
    show_error = partial(_error_page, snapshot)
    kinds = (HTTPException, TBAError, Exception)
    return Starlette(
        routes=[*routes, Route("/refresh", refresh, methods=["GET"])],
        exception_handlers=dict.fromkeys(kinds, show_error),
    )


def _answer(make: Callable[[Request], str], request: Request) -> Response:
    return HTMLResponse(make(request).encode(errors="replace"))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) < _GREATEST):
        raise Refused(_NO_PAGE)
    return int(text)


def _error_page(snapshot: RunSnapshot, request: Request, error: Exception) -> Response:
    """Return the page of an error. The terminal shows the traceback of an unexpected error."""
    if isinstance(error, TooLong):
        status, message = 503, str(error)
    elif isinstance(error, Refused):
        status, message = 404, str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, _NO_PAGE if error.status_code == 404 else error.detail
    elif isinstance(error, QueryError):
        status, message = 500, explain(error)
    elif isinstance(error, TBAError):
        status, message = 502, str(error)
    else:
        status, message = 500, f"unexpected {type(error).__name__}; the terminal of tba browse shows where"
    title = "Page not found" if status == 404 else "This page could not be shown"
    page = show(snapshot, request.url.path, "problem.html", title=title, message=message)
    return HTMLResponse(page.encode(errors="replace"), status)
