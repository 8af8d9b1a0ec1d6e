"""Makes pipes, sockets, devices and links under the names of objects, and sets deadlines for tests that read them."""

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

Kind = Literal["pipe", "socket", "device", "link to a pipe", "link to nothing", "link to itself"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PATIENCE = 60.0


def put_irregular(path: Path, kind: Kind) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _put_socket(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # an endless stream of zeros
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "link to a pipe":
        os.mkfifo(pipe := path.with_name(f".{path.name}-pipe"))
        path.symlink_to(pipe)
    else:
        path.symlink_to(path if kind == "link to itself" else path.with_name(".nothing"))


def _put_socket(path: Path) -> None:
    """Bind a socket through a short name, because the address of a socket has at most about 100 characters."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def within_patience(action: Callable[[], Any]) -> Any:
    """Return or raise the result of an action. If the action hangs, fail the test instead of waiting forever."""
    done: list[Callable[[], Any]] = []

    def act() -> None:
        try:
            result = action()
        except BaseException as error:
            raised = error
            done.append(lambda: _raise(raised))
        else:
            done.append(lambda: result)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done, "it hangs"
    return done[0]()


def _raise(error: BaseException) -> None:
    raise error
