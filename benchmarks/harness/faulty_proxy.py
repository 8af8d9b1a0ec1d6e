"""A proxy before an S3 server that does what networks and servers do on a bad day, as a script or by chance."""

import http.client
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from benchmarks.harness.servers import Server

Operation = Literal["get", "head", "list", "uploads", "put", "part", "begin", "complete", "abort", "delete"]

Fault = Literal[
    "pass",  # nothing goes wrong
    # The server is not asked:
    "error",  # 500
    "busy",  # 503 SlowDown
    "throttled",  # 429
    "unheard",  # the connection ends
    "silent",  # no answer until the client gives up
    "cut",  # the connection is reset in the middle of the request's body; the server gets that half
    # The server has done what was asked:
    "failed",  # 500 all the same
    "disguised",  # 200 with an error in the body
    "unanswered",  # the connection ends
    "late",  # no answer until the client gives up
    "torn",  # the connection is reset in the middle of the answer's body
    "short",  # half of the answer's body, with the length of that half
    "empty",  # none of the answer's body, and a length of 0
    "slow",  # both bodies drop by drop
    "stale",  # a listing as it was `lag` writes ago: without what has been created since
]

SAID: dict[str, tuple[int, str]] = {
    "error": (500, "InternalError"),
    "busy": (503, "SlowDown"),
    "throttled": (429, "TooManyRequests"),
    "failed": (500, "InternalError"),
    "disguised": (200, "InternalError"),
}


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Proxy:
    """Meets the requests of some operations with the faults of `plan`, in order; then each by chance, if asked to."""

    def __init__(self, upstream: Server):
        self.upstream = urlsplit(upstream.endpoint).netloc
        self.operations: Collection[Operation] = ("put", "part")
        self.plan: list[Fault] = []
        self.seen = 0  # requests of these operations
        self.met: Counter[Fault] = Counter()
        self.lag = 20  # writes
        self.is_away = False
        self._chance: tuple[int, float, Sequence[Fault]] | None = None
        self._asked: Counter[str] = Counter()
        self._born: dict[str, int] = {}  # how many objects had been created before, by key
        self._lock = threading.Lock()
        self._server = self._listen(0)

    def at_random(self, seed: int, rate: float, faults: Sequence[Fault]) -> None:
        """From here on. Whether the n-th request for an object fails, and how, follows from the seed alone, whatever
        order the requests of several threads come in."""
        self._chance = (seed, rate, faults)

    def recover(self) -> None:
        """Nothing goes wrong any more."""
        self.plan, self._chance = [], None

    def leave(self) -> None:
        """Nobody listens, and who was connected already goes unheard."""
        self.is_away = True
        self.close()

    def come_back(self) -> None:
        self._server = self._listen(self.port)
        self.is_away = False

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_fault(self, operation: Operation, key: str) -> Fault:
        with self._lock:
            fault = self._next_fault(operation, key)
            self.met[fault] += 1
            return fault

    def _next_fault(self, operation: Operation, key: str) -> Fault:
        if self.is_away:
            return "unheard"
        if operation not in self.operations:
            return "pass"
        self.seen += 1
        if self.plan:
            return self.plan.pop(0)
        if self._chance is None:
            return "pass"
        seed, rate, faults = self._chance
        asked = f"{operation} {re.sub('[0-9a-f]{12,}', '*', key)}"  # roots, and what is probed, have random names
        self._asked[asked] += 1
        chance = random.Random(f"{seed} {asked} {self._asked[asked]}")
        return chance.choice(faults) if chance.random() < rate else "pass"

    def saw_created(self, key: str) -> None:
        with self._lock:
            self._born.setdefault(key, len(self._born))

    def earlier(self, listing: bytes) -> bytes:
        """A listing without what was created last, and so without the folders that had nothing else in them."""
        with self._lock:
            old = {key for key, born in self._born.items() if len(self._born) - born > self.lag}
            new = self._born.keys() - old

        def keep(match: re.Match[bytes]) -> bytes:
            name = unquote(match[2].decode())
            hidden = name in new if match[1] == b"Key" else not any(key.startswith(name) for key in old)
            return b"" if hidden else match[0]

        listing = re.sub(
            rb"<Contents>(?:(?!</Contents>).)*?<(Key)>([^<]*)</Key>.*?</Contents>", keep, listing, flags=re.S
        )
        return re.sub(rb"<CommonPrefixes>\s*<(Prefix)>([^<]*)</Prefix>\s*</CommonPrefixes>", keep, listing)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"proxy": self})
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server


@contextmanager
def faulty(upstream: Server) -> Iterator[tuple[Proxy, Server]]:
    proxy = Proxy(upstream)
    try:
        yield proxy, Server(f"http://127.0.0.1:{proxy.port}", upstream.key, upstream.secret)
    finally:
        proxy.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a client that has given up, or was killed
            super().handle()

    def forward(self) -> None:
        operation, key = self.operation()
        fault = self.proxy.next_fault(operation, key)
        with suppress(ConnectionError):
            self.meet(fault, operation, key)

    def operation(self) -> tuple[Operation, str]:
        url = urlsplit(self.path)
        asked = parse_qs(url.query, keep_blank_values=True)
        key = unquote(url.path).lstrip("/").partition("/")[2]
        match self.command:
            case "GET" if "uploads" in asked:
                return "uploads", asked.get("prefix", [""])[0]
            case "GET" if "list-type" in asked:
                return "list", asked.get("prefix", [""])[0]
            case "PUT" if "partNumber" in asked:
                return "part", key
            case "POST":
                return "begin" if "uploads" in asked else "complete", key
            case "DELETE" if "uploadId" in asked:
                return "abort", key
            case method:
                return {"GET": "get", "HEAD": "head", "PUT": "put", "DELETE": "delete"}[method], key  # type: ignore

    def meet(self, fault: Fault, operation: Operation, key: str) -> None:
        self.close_connection = fault not in ("pass", "slow", "stale")
        body = self.take(int(self.headers.get("Content-Length", 0)), fault)
        if fault == "cut":
            self.ask(body)
            self.reset()
        elif fault in ("error", "busy", "throttled"):
            self.say(fault)
        elif fault == "silent":
            self.wait()
        elif fault != "unheard" and (answer := self.ask(body)):
            if operation in ("put", "complete") and answer.status == 200:
                self.proxy.saw_created(key)
            self.deliver(fault, answer)

    def take(self, length: int, fault: Fault) -> bytes:
        if fault == "cut":
            return self.rfile.read(length // 2)
        if fault != "slow":
            return self.rfile.read(length)
        return b"".join(map(self.drop, [length // 8] * 8 + [length % 8]))

    def drop(self, length: int) -> bytes:
        time.sleep(0.005)
        return self.rfile.read(length)

    def ask(self, body: bytes) -> Answer | None:
        connection = http.client.HTTPConnection(self.proxy.upstream, timeout=20)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            if len(body) < int(self.headers.get("Content-Length", 0)):
                return None
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    def deliver(self, fault: Fault, answer: Answer) -> None:
        half = answer.body[: len(answer.body) // 2]
        match fault:
            case "failed" | "disguised":
                self.say(fault)
            case "late":
                self.wait()
            case "torn":
                self.answer(answer, half)
                self.reset()
            case "short" | "empty":
                whole = answer._replace(body=half if fault == "short" else b"")
                self.answer(whole, whole.body)
            case "slow":
                self.answer(answer, b"")
                size = len(answer.body) // 8 + 1
                for start in range(0, len(answer.body), size):
                    time.sleep(0.005)
                    self.wfile.write(answer.body[start : start + size])
            case "stale":
                whole = answer._replace(body=self.proxy.earlier(answer.body))
                self.answer(whole, whole.body)
            case "pass":
                self.answer(answer, answer.body)

    def say(self, fault: Fault) -> None:
        status, code = SAID[fault]
        body = f"<Error><Code>{code}</Code><Message>{fault}</Message></Error>".encode()
        self.answer(Answer(status, [], body), body)

    def answer(self, answer: Answer, body: bytes) -> None:
        """The head of an answer, and as much of its body as is given."""
        self.send_response_only(answer.status)
        given = {name.lower(): value for name, value in answer.headers}
        for name, value in answer.headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", given.get("content-length", "0"))
        elif answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def wait(self) -> None:
        """Until the client gives up."""
        self.connection.settimeout(60)
        with suppress(TimeoutError):
            self.rfile.read(1)

    def reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

    def log_message(self, format: str, *args: object) -> None: ...
