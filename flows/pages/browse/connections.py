"""Limits on connections to the pages: how many may be open, for how long, and which is closed if there are too many.

A connection is silent until it has sent a whole request, and again once it has its answer. If there are too many
connections, the server closes the connection that has been silent longest. So a client that sends its request at once
gets an answer, however many other clients hold connections open or send a request letter by letter.
"""

import asyncio
import ipaddress
import math
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_AN_IPV6_NETWORK = 64  # bits of an address that the machines of a network share
_AT_ONCE = struct.pack("ii", 1, 0)
_QUEUE = 512  # connections that wait in the kernel


@dataclass(frozen=True)
class Limits:
    """Bounds on connections. A reader's browser holds about six."""

    connections: int = 256
    of_a_peer: int = 32
    request_seconds: float = 10.0  # until the whole first request has arrived, even if parts of it keep arriving
    idle_seconds: float = 5.0  # from an answer until the whole next request has arrived
    answer_seconds: float = 120.0  # until the client has received a whole answer
    accepted_at_once: int = 8  # before their requests are read; a burst closes no connection whose request has come


class Crowd:
    """All connections of a server."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._peers: dict[Connection, str] = {}
        self._silent: dict[Connection, None] = {}  # in the order in which they fell silent

    def enter(self, connection: "Connection", peer: str) -> None:
        """Add a connection. If there are too many, close a silent connection, which may be the new one."""
        self._peers[connection] = peer
        self.fall_silent(connection)
        counts = Counter(self._peers.values())
        if counts[peer] > self.limits.of_a_peer:
            self._close_one(peer)
        elif len(self._peers) > self.limits.connections:
            most = Counter(self._peers[silent] for silent in self._silent).most_common(1)[0][0]
            self._close_one(most)

    def _close_one(self, peer: str) -> None:
        """Close the peer's connection that has been silent longest. At least the new connection is silent."""
        first = next(silent for silent in self._silent if self._peers[silent] == peer)
        self.leave(first)
        first.abort()

    def fall_silent(self, connection: "Connection") -> None:
        if connection in self._peers:
            self._silent[connection] = None

    def speak(self, connection: "Connection") -> None:
        self._silent.pop(connection, None)

    def leave(self, connection: "Connection") -> None:
        self._silent.pop(connection, None)
        self._peers.pop(connection, None)


class Connection(H11Protocol):
    """A connection with two deadlines: to send a whole request, and to take a whole answer. Parts of a request or of an
    answer do not extend a deadline."""

    crowd: Crowd  # set by a subclass for each server

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._request_due: asyncio.TimerHandle | None = None
        self._answer_due: asyncio.TimerHandle | None = None
        self._is_answering = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # tells when the client has taken a whole answer
        self._request_due = self.loop.call_later(self.crowd.limits.request_seconds, self.abort)
        self.crowd.enter(self, _peer(self.client))

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._request_due, self._answer_due = _cancel(self._request_due), _cancel(self._answer_due)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._notice_request()

    def on_response_complete(self) -> None:
        self._is_answering = False
        super().on_response_complete()  # which may find another request
        self._notice_request()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_due = self.loop.call_later(self.crowd.limits.answer_seconds, self.abort)

    def resume_writing(self) -> None:
        self._answer_due = _cancel(self._answer_due)
        super().resume_writing()
        self._await_request()

    def abort(self) -> None:
        """Close at once. The kernel drops all data that the client has not taken."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _notice_request(self) -> None:
        if not self._is_answering and self.cycle is not None and not self.cycle.response_complete:
            self._is_answering = True
            self._request_due = _cancel(self._request_due)
            self.crowd.speak(self)

    def _await_request(self) -> None:
        """If the client has received the whole answer and no request is open, start the idle timer and mark the
        connection as silent."""
        is_taken = self._answer_due is None and not self.transport.is_closing()
        if is_taken and not self._is_answering and self._request_due is None:
            self._request_due = self.loop.call_later(self.crowd.limits.idle_seconds, self.abort)
            self.crowd.fall_silent(self)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


def _peer(client: tuple[str, int] | None) -> str:
    """Return the address under which the connections of a peer are counted. It is an IPv4 address, or the network of an
    IPv6 address, since one machine has very many IPv6 addresses."""
    address = ipaddress.ip_address(client[0].partition("%")[0]) if client else None
    if isinstance(address, ipaddress.IPv6Address) and not address.ipv4_mapped:
        return str(ipaddress.ip_network((address, _AN_IPV6_NETWORK), strict=False))
    return str(address)


class CrowdedServer(uvicorn.Server):
    """Serves an app to connections within `limits`, and calls `on_end` before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, limits: Limits, on_end: Callable[[], None]):
        config.http = type("BoundConnection", (Connection,), {"crowd": Crowd(limits)})
        config.backlog = limits.accepted_at_once  # asyncio accepts as many connections at once
        config.timeout_keep_alive = math.ceil(limits.idle_seconds)
        super().__init__(config)
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        await super().shutdown(sockets)
