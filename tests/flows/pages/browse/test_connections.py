"""`tba browse` and hostile clients: a complete request is answered, whatever others do with their connections."""

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from flows.pages.browse.connections import Limits
from flows.pages.tables import Table
from storage.runs.run import Run
from tests.support.flows.site import Site, serve

DEADLINE = 60.0  # seconds for what has to happen
HOURS = 10_000.0  # longer than any test, so that another rule must be what closes a connection
HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Drip: "
LONG = "/sql?query=select+{}+from+range(200)".format(",".join(["repeat('a',300)"] * 20))


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(site: Site, sockets: ExitStack, *, peer: str = "127.0.0.1", sends: bytes = b"") -> socket.socket:
    address = "127.0.0.1", site.door.port
    opened = sockets.enter_context(socket.create_connection(address, DEADLINE, source_address=(peer, 0)))
    opened.sendall(sends)
    return opened


def request(site: Site, path: str = "/nothing") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{site.door.port}\r\n\r\n".encode()


def is_answered(site: Site, connection: socket.socket) -> bool:
    """Return True if a request gets an answer, and False if the server has closed the connection."""
    try:
        connection.sendall(request(site))
        return connection.recv(100).startswith(b"HTTP/1.1 ")
    except ConnectionError:
        return False


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server. Return True if it closes the connection, and False if it sends something first."""
    with suppress(ConnectionError):
        return connection.recv(100) == b""
    return True


def is_refused(site: Site, sockets: ExitStack) -> bool:
    """Return True if the server closes a new connection, which may happen before the client has opened it."""
    with suppress(ConnectionError):
        return is_closed(connect(site, sockets))
    return True


def test_a_reader_is_answered_beside_any_number_of_silent_and_dripping_connections(finished: Run, sockets: ExitStack):
    limits = Limits(request_seconds=HOURS, idle_seconds=HOURS)
    with serve(finished, with_token=True, limits=limits) as site:
        others = [connect(site, sockets, sends=(b"", HALF)[n % 2]) for n in range(300)]
        cookie = {"Cookie": f"{site.door.cookie}={site.door.token}"}
        for n in range(3):
            assert site.ask("/steps", **cookie)[0] == 200
            for other in others[n::3]:
                with suppress(ConnectionError):
                    other.sendall(b"x")
        assert site.ask("/steps", **cookie)[0] == 200


def test_a_request_that_never_becomes_complete_is_given_up_however_steadily_it_arrives(
    finished: Run, sockets: ExitStack
):
    with serve(finished, limits=Limits(request_seconds=0.3, idle_seconds=HOURS)) as site:
        assert is_closed(connect(site, sockets))
        dripping = connect(site, sockets, sends=HALF)
        for _ in range(int(DEADLINE / 0.05)):
            if select.select([dripping], [], [], 0.05)[0]:
                break
            with suppress(ConnectionError):
                dripping.sendall(b"x")
        assert is_closed(dripping)


def test_a_connection_that_asks_for_nothing_more_is_closed(finished: Run, sockets: ExitStack):
    """The same holds if the client sends only the beginning of another request."""
    with serve(finished, limits=Limits(request_seconds=HOURS, idle_seconds=0.3)) as site:
        for more in (b"", HALF):
            connection = connect(site, sockets)
            assert is_answered(site, connection)
            connection.sendall(more)
            while not is_closed(connection):  # the rest of the answer comes first
                pass


def test_an_answer_that_nobody_takes_is_given_up(finished: Run, sockets: ExitStack):
    with serve(finished, limits=Limits(answer_seconds=0.3, idle_seconds=HOURS)) as site:
        connection = connect(site, sockets, sends=request(site, LONG) * 20)
        ended = select.poll()
        ended.register(connection, select.POLLHUP)
        assert ended.poll(DEADLINE * 1000)


def test_a_peer_has_a_limit_of_connections_and_the_longest_silent_one_makes_room(finished: Run, sockets: ExitStack):
    limits = Limits(of_a_peer=4, accepted_at_once=1, request_seconds=HOURS, idle_seconds=HOURS)
    with serve(finished, limits=limits) as site:
        other = connect(site, sockets, peer="127.0.0.2")
        own = [connect(site, sockets) for _ in range(6)]
        assert all(map(is_closed, own[:2]))
        assert all(is_answered(site, connection) for connection in (*own[2:], other))


def test_the_peer_with_most_silent_connections_makes_room_when_there_are_too_many(finished: Run, sockets: ExitStack):
    limits = Limits(connections=4, of_a_peer=3, accepted_at_once=1, request_seconds=HOURS, idle_seconds=HOURS)
    with serve(finished, limits=limits) as site:
        one = connect(site, sockets, peer="127.0.0.2")
        many = [connect(site, sockets, peer="127.0.0.3") for _ in range(3)]
        newcomer = connect(site, sockets, peer="127.0.0.4")
        assert is_closed(many[0])
        assert all(is_answered(site, connection) for connection in (one, *many[1:], newcomer))


class Held:
    """Pages of a site whose queries wait until the test lets them go."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch):
        self.asked = threading.Semaphore(0)
        self.go = threading.Event()

        def ask(query: str, parameters: object = ()) -> Table:
            self.asked.release()
            assert self.go.wait(DEADLINE)
            return Table([], [])

        monkeypatch.setattr(site.snapshot, "ask", ask)


def test_a_connection_that_is_being_answered_makes_no_room(
    finished: Run, sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    limits = Limits(of_a_peer=4, accepted_at_once=1, request_seconds=HOURS, idle_seconds=HOURS)
    with serve(finished, limits=limits) as site:
        held = Held(site, monkeypatch)
        asking = [connect(site, sockets, sends=request(site, "/step/1")) for _ in range(4)]
        assert all(held.asked.acquire(timeout=DEADLINE) for _ in asking)
        assert all(is_refused(site, sockets) for _ in range(6))
        held.go.set()
        assert all(connection.recv(100).startswith(b"HTTP/1.1 404") for connection in asking)


def test_of_too_many_pages_at_once_the_last_is_refused(finished: Run, monkeypatch: pytest.MonkeyPatch):
    with serve(finished, limits=Limits(of_a_peer=100)) as site, ThreadPoolExecutor(32) as readers:
        held = Held(site, monkeypatch)
        answers = [readers.submit(site.ask, "/step/1") for _ in range(32)]
        assert all(held.asked.acquire(timeout=DEADLINE) for _ in answers)
        status, _, body = site.ask("/step/1")
        held.go.set()
        assert (status, "at once" in body) == (503, True)
        assert {answer.result()[0] for answer in answers} == {404}
