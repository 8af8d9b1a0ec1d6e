"""The listening socket, the names of this machine and the settings of uvicorn, for all HTTP servers of commands."""

import errno
import ipaddress
import socket
from typing import Any

import uvicorn

from tba.errors import ConfigError


def listen(host: str, port: int, *, host_option: str, port_option: str) -> socket.socket:
    """Return a listening socket. Raise ConfigError, naming the option at fault, if the address cannot be used."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"{host_option}: no machine is named {host!r}") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            reason = f"{port_option}: {port} is in use; choose another port, or 0 for any free port"
        elif error.errno == errno.EACCES:
            reason = f"{port_option}: {port} needs more rights; choose a port from 1024 on"
        else:
            reason = f"{host_option}: cannot listen on {host}: {error.strerror}"
        raise ConfigError(reason) from None
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """True if only this machine can connect."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def in_url(host: str) -> str:
    """Return a host as it is written in a URL and in the header `Host`."""
    return f"[{host}]" if ":" in host else host


def local_names(host: str) -> tuple[str, ...]:
    """Return the names of this machine in the header `Host` of requests to a server that listens on loopback, at
    `host`. Any other name may come from a site whose DNS leads to this machine."""
    return "127.0.0.1", "localhost", "[::1]", in_url(host).lower()


def settings(app: Any, **changes: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        **changes,
    )
