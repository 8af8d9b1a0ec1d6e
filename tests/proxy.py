"""A proxy before an S3 server that loses what it is told to lose."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from tests.servers import Server

Fault = Literal["busy", "unheard", "unanswered", "cut", "pass"]
"""busy: 503 without asking the server; unheard: the connection ends before the server is asked; unanswered: it ends
after the server has done what was asked; cut: the server gets half of the body; pass: nothing goes wrong."""


class Proxy:
    """Meets the requests of one method with the faults of a plan, in order, and lets all others through."""

    def __init__(self, upstream: Server):
        self.upstream = urlsplit(upstream.endpoint).netloc
        self.method = "PUT"
        self.plan: list[Fault] = []
        self.seen = 0

    def next_fault(self, method: str) -> Fault:
        if method != self.method:
            return "pass"
        self.seen += 1
        return self.plan.pop(0) if self.plan else "pass"


@contextmanager
def faulty(upstream: Server) -> Iterator[tuple[Proxy, Server]]:
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.next_fault(self.command)
            self.close_connection = fault != "pass"
            if fault == "unheard":
                return
            if fault == "busy":
                self.answer(503, [], b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>")
                return
            answered = self.ask(body[: len(body) // 2] if fault == "cut" else body)
            if fault == "pass" and answered:
                self.answer(*answered)

        def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes] | None:
            connection = http.client.HTTPConnection(proxy.upstream, timeout=20)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                if len(body) < int(self.headers.get("Content-Length", 0)):
                    return None
                response = connection.getresponse()
                return response.status, response.getheaders(), response.read()
            finally:
                connection.close()

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers}.get("content-length", str(len(body)))
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy, Server(f"http://127.0.0.1:{server.server_address[1]}", upstream.key, upstream.secret)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
