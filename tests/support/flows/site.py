"""Pages of a run for tests: a server in a thread, the text and links of its answers, and rows to compare them with."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from urllib.parse import urlencode

import duckdb

from flows.pages.browse import guard, server
from flows.pages.browse.connections import Limits
from flows.pages.browse.guard import Door
from flows.pages.browse.run_snapshot import RunSnapshot
from storage.runs.run import Run


class Site:
    """The pages of a run, served from a thread."""

    def __init__(self, door: Door, snapshot: RunSnapshot):
        self.door = door
        self.snapshot = snapshot
        self.url = f"http://127.0.0.1:{door.port}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.door.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            got = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, got, answer.read().decode()
        finally:
            connection.close()

    def text(self, path: str) -> str:
        status, _, body = self.ask(path)
        assert status == 200, body
        return Whole(body).said

    def link(self, path: str, **query: str) -> str:
        return f"{path}?{urlencode(query)}"


class Whole(HTMLParser):
    """The text of a page. Asserts that all tags are closed, and that the page has no scripts and no inline styles."""

    VOID = ("meta", "link", "br", "input")
    INSIDE_SVG = ("rect", "line", "circle", "polyline", "polygon")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def said(self) -> str:
        return " ".join("".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        assert not any(name.startswith("on") or name == "style" for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.parts.append(data)


def links(body: str) -> list[str]:
    class Links(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [value or "" for name, value in attrs if tag == "a" and name == "href"]

    parser = Links()
    parser.feed(body)
    return parser.found


def one(con: duckdb.DuckDBPyConnection, query: str) -> tuple:
    [row] = con.execute(query).fetchall()
    return row


@contextmanager
def serve(
    run: Run,
    *,
    with_token: bool = False,
    seconds: float = 20.0,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
) -> Iterator[Site]:
    listening, door = guard.open_door(host, 0, with_token=with_token)
    snapshot = RunSnapshot(run, seconds)
    uvicorn = server.make_server(snapshot, door, limits)
    thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Site(door, snapshot)
    finally:
        uvicorn.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()
