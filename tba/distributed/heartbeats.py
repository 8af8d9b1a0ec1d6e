"""Signs of life of the ranks, in the store at which they met: a heartbeat of each rank, and the error of a rank that
ends with one.

The heartbeats use a connection of their own, because a thread that waits in a store holds its connection.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Self

import torch.distributed as dist

from tba.distributed.process_group import reach
from tba.errors import RunFailed, TBAError, error_named


class Ended(NamedTuple):
    """Why a rank has ended."""

    error: Exception
    follows: bool  # True if the error only says that the connection to some rank has broken


def is_of_connection(error: Exception) -> bool:
    """True if an error of this rank most likely says only that another rank does not answer."""
    of_torch = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL"))
    return of_torch or isinstance(error, dist.DistError)


def greet(store: dist.TCPStore, rank: int) -> str | None:
    """Write the name of this rank's process into the store. Return None, or the name of another process that has
    joined as the same rank before."""
    name = f"rank {rank} of the trainer (pid {os.getpid()} on {socket.gethostname()})"
    found = store.compare_set(_name(rank), "", name).decode()
    return None if found == name else found


def name_of(store: dist.TCPStore, rank: int) -> str | None:
    """Return the name of a rank that has greeted; None if it has not."""
    return store.get(_name(rank)).decode() if store.check([_name(rank)]) else None


class Heartbeats:
    """A thread that writes the heartbeat of this rank every `every` seconds, and reads the heartbeats of the ranks that
    it watches. By its own clock, it notes when each has last changed."""

    def __init__(self, store: dist.TCPStore, rank: int, watched: Sequence[int], *, every: float):
        self.rank, self.every = rank, every
        self.cut = False  # True once the connection to the store has broken: rank 0, or torchrun's agent, has ended
        self._store = reach(store.host, store.port)
        self._store.set_timeout(timedelta(seconds=max(every, 1.0)))
        self._seen = {it: (b"", time.monotonic()) for it in watched}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="heartbeats", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()

    def silence(self, rank: int) -> float:
        """Return how many seconds ago the heartbeat of a watched rank has last changed."""
        return time.monotonic() - self._seen[rank][1]

    def count_anew(self) -> None:
        """Count the silence of the watched ranks from now on. Rank 0 gives no sign of life before all ranks are there,
        so a rank that came early must not count the time before."""
        self._seen = {rank: (beat, time.monotonic()) for rank, (beat, _) in self._seen.items()}

    def report(self, error: Exception) -> None:
        """Tell rank 0 with which error this rank ends."""
        said = {"error": type(error).__name__, "says": str(error), "follows": is_of_connection(error)}
        self._store.set(_error(self.rank), json.dumps(said))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell rank 0 if the `with` block ends with an error."""
        try:
            yield
        except Exception as error:
            with suppress(RuntimeError):
                self.report(error)
            raise

    def reported(self, rank: int, name: str) -> Ended | None:
        """Return what a rank has reported; None if it has reported no error. An error that is not a TBAError becomes a
        RunFailed that names the rank."""
        if not self._store.check([_error(rank)]):
            return None
        said = json.loads(self._store.get(_error(rank)))
        error = error_named(said["error"], said["says"])
        return Ended(error if isinstance(error, TBAError) else RunFailed(f"{name}: {error}"), said["follows"])

    def _keep(self) -> None:
        beat = 0
        while not self._closing.is_set():
            try:
                self._store.set(_beat(self.rank), str(beat := beat + 1))
                self._look()
            except dist.DistNetworkError:
                self.cut = True
                return
            except RuntimeError:  # the store is slow; a store that stays silent counts as a rank that does
                pass
            self._closing.wait(self.every)

    def _look(self) -> None:
        keys = {it: _beat(it) for it in self._seen}
        begun = [it for it, key in keys.items() if self._store.check([key])]
        for rank, beat in zip(begun, self._store.multi_get([keys[it] for it in begun]) if begun else [], strict=True):
            if beat != self._seen[rank][0]:
                self._seen[rank] = beat, time.monotonic()


def _name(rank: int) -> str:
    return f"tba/name/{rank}"


def _beat(rank: int) -> str:
    return f"tba/beat/{rank}"


def _error(rank: int) -> str:
    return f"tba/error/{rank}"
