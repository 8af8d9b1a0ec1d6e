"""All ranks except rank 0, as rank 0 sees them."""

import json
import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from tba.distributed.heartbeats import Heartbeats, is_of_connection, name_of
from tba.distributed.orders import END, answers, send_order
from tba.distributed.process_group import PATIENCE, reach
from tba.distributed.ranks import Ranks
from tba.errors import DeadlinePassed, RunFailed, TBAError
from tba.runtime.child import END_PATIENCE, end_child, how_ended, start_child
from tba.runtime.messages import Numbers
from tba.runtime.waiting import looks

log = logging.getLogger(__name__)

_SUSPECT = 5.0  # seconds without a heartbeat, or of two heartbeats, after which a broken connection is blamed on a rank

HAS_CHECKPOINT = "checkpoint"
"""The key under which a rank says that it has read what it continues from; see `Followers.stored_parts`."""

Children = Mapping[int, "subprocess.Popen[bytes]"]
"""The ranks that rank 0 has started itself, by their number."""


def await_ranks(
    store: dist.TCPStore, size: int, children: Children, patience: float, check: Callable[[], None] = lambda: None
) -> dict[int, str]:
    """Wait until all other ranks have come to the store, and return their names. Raise RunFailed or DeadlinePassed,
    naming the ranks that are missing. `check` is called again and again, and raises the reason to stop waiting."""
    names = dict[int, str]()
    for _ in looks(patience):
        check()
        names |= {rank: name for rank in range(1, size) if rank not in names and (name := name_of(store, rank))}
        if len(names) == size - 1:
            return names
        for rank in children.keys() - names.keys():
            if children[rank].poll() is not None:
                raise RunFailed(f"rank {rank} of the trainer has died ({how_ended(children[rank])})")
    missing = [rank for rank in range(1, size) if rank not in names]
    raise DeadlinePassed(f"of {size} ranks, these have not joined for {patience:g} s: {', '.join(map(str, missing))}")


class Followers:
    """All ranks except rank 0. If one of them is lost while rank 0 waits for it in the process group, rank 0 may wait
    forever. The process of rank 0 is therefore ended. If rank 0 has noticed the loss, it first gets time to store the
    syncs that were closed before."""

    def __init__(
        self,
        store: dist.TCPStore,
        names: Mapping[int, str],
        *,
        children: Children,
        every: float,
        silent_after: float,
        grace: float = 3 * END_PATIENCE,
        report: Callable[[str], object] | None = None,  # called with the reason before the process of rank 0 is ended
        parts: int = 0,  # see `Ranks`
    ):
        self.ranks, self.names, self.children = Ranks(0, len(names) + 1, parts), names, children
        self.silent_after, self.grace, self._store = silent_after, grace, reach(store.host, store.port)
        self._report = report
        self.suspect_after = max(_SUSPECT, 2 * every)
        self.heartbeats = Heartbeats(store, 0, [*names], every=every)
        self._lost: Exception | None = None  # why another rank has ended, once the thread knows of it
        self._noticed, self._leaving, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._in_step = True  # False once an order has failed: no further order may be sent
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.heartbeats.close()

    def together(self, what: str, mine: Callable[[], Any], said: Any = None, numbers: Numbers = ()) -> list[Any]:
        """Carry out an order in all ranks at once. Return the result of this rank, followed by the answers of the other
        ranks."""
        self.check()
        try:
            send_order(what, said, numbers)
            return [mine(), *answers()]
        except Exception as error:
            self._in_step = False
            if not isinstance(error, TBAError):  # most likely caused by another rank, whose error says more
                self._raise_why_lost()
            if is_of_connection(error):
                raise RunFailed(f"the ranks of the trainer did not carry out {what!r} together: {error}") from error
            raise

    def check(self) -> None:
        """Raise the error with which another rank has ended, if any has."""
        if self._lost:
            self._noticed.set()
            raise self._lost

    def stored_parts(self, key: str) -> list[Any]:
        """Wait until every other rank has said, under this key, what it has stored, and return what they said. An
        upload may take long, so the wait has no deadline; it ends with an error if a rank is lost."""
        keys = [part_key(key, rank) for rank in self.names]
        for _ in looks(math.inf):
            self.check()
            if self._store.check(keys):
                break
        parts = [json.loads(it) for it in self._store.multi_get(keys)]
        for it in keys:
            self._store.delete_key(it)
        return parts

    def release(self) -> None:
        """Let all ranks end. Call this before rank 0 leaves the process group."""
        self._leaving.set()
        if dist.is_initialized() and self._in_step and not self._lost:
            with suppress(RuntimeError):
                send_order(END, patience=timedelta(seconds=END_PATIENCE))

    def why_lost(self, silent_after: float) -> tuple[Exception, bool] | None:
        """Return why another rank has ended, or None if all are alive. Also return whether a better reason may be
        found later: a rank may end because it has lost the connection to the rank that ended first."""
        follows: Exception | None = None
        for rank, name in self.names.items():
            died = rank in self.children and self.children[rank].poll() is not None
            reported = self.heartbeats.reported(rank, name)
            if reported and not reported.follows:
                return reported.error, False
            if died and not reported:
                return RunFailed(f"{name} has died ({how_ended(self.children[rank])})"), False
            if not reported and (silence := self.heartbeats.silence(rank)) > silent_after:
                return RunFailed(f"{name} has given no sign of life for {silence:.0f} s"), False
            follows = follows or (reported.error if reported else None)
        return (follows, True) if follows else None

    def _raise_why_lost(self) -> None:
        """Wait a few seconds for the reason why a call of the process group has failed, and raise it."""
        self._noticed.set()
        found: tuple[Exception, bool] | None = None
        for _ in looks(END_PATIENCE):
            if (found := self.why_lost(self.suspect_after)) and not found[1]:
                break
        if found:
            self._lost = found[0]
            raise found[0]

    def _watch(self) -> None:
        while not self._closing.wait(1.0):
            try:
                found = self.why_lost(self.silent_after)
            except RuntimeError as error:  # the store, which torchrun's agent may hold, does not answer
                found = RunFailed(f"the store at which the ranks met is gone: {error}"), False
            if found and found[1]:
                self._closing.wait(END_PATIENCE)
                found = self.why_lost(self.suspect_after) or found
            if found:
                self._lost = self._lost or found[0]
                if not self._ends_by_itself():
                    self._end_process()
                return

    def _end_process(self) -> None:
        why = f"{self._lost}; rank 0 did not stop by itself within {self.grace:g} s"
        log.error("%s", why)
        try:
            if self._report:
                self._report(why)
        finally:
            os._exit(1)

    def _ends_by_itself(self) -> bool:
        """Wait until rank 0 has ended its work, and return True; return False if it does not do so in time."""
        if self._closing.wait(self.grace):
            return True
        if self._noticed.is_set():
            self._leaving.wait(PATIENCE.total_seconds())
            return self._closing.wait(self.grace)
        return False


def part_key(key: str, rank: int) -> str:
    return f"tba/part/{key}/{rank}"


@contextmanager
def start_children(command: Sequence[str], places: Mapping[int, Mapping[str, str]]) -> Iterator[Children]:
    """Start ranks on this machine, and yield them. `places` has the environment variables of each, by its number. At
    the end of the `with` block, wait a little for them to end, and kill those that do not."""
    children = dict[int, "subprocess.Popen[bytes]"]()
    try:
        for rank, variables in places.items():
            children[rank] = start_child(command, stdin=subprocess.DEVNULL, env={**os.environ, **variables})
        yield children
    finally:
        deadline = time.monotonic() + END_PATIENCE
        for child in children.values():
            end_child(child, max(deadline - time.monotonic(), 0.0))
