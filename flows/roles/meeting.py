"""Where the ranks of a trainer meet. Rank 0 opens a meeting for its attempt, and records it in storage. The other ranks
find the meeting, and join only the newest attempt, and only the group of ranks that they were started for."""

import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from storage.objects import records
from storage.runs.attempts import newest_attempt
from storage.runs.rendezvous import Rendezvous, announce, find_rendezvous, newest_rendezvous
from storage.runs.run import Run
from tba.errors import ConfigError, DeadlinePassed
from tba.runtime.waiting import looks

if TYPE_CHECKING:
    from tba.distributed.process_group import Group, Meeting
    from tba.distributed.world import World

LOOK_EVERY = 2.0  # seconds between two looks for the record of the newest attempt
CONNECT = timedelta(seconds=5)  # how long rank 0 has to answer at the address in a record; else the record is old


def open_meeting(run: Run, attempt: int, world: "World") -> "Meeting":
    """Open the meeting of an attempt, and record its address in storage. Only rank 0 does so."""
    from tba.distributed import process_group

    meeting, token = process_group.open_meeting(world), secrets.token_hex(8)
    announce(
        run,
        Rendezvous(
            attempt=attempt,
            address=meeting.address,
            port=meeting.port,
            size=world.size,
            token=token,
            created_at=records.now(),
        ),
    )
    process_group.admit(meeting, process_group.Group(attempt=attempt, size=world.size, token=token))
    return meeting


def find_meeting(run: Run, world: "World") -> "tuple[Meeting, int]":
    """Find the meeting of the newest attempt and greet rank 0. Return the meeting and the number of the attempt. Raise
    ConfigError, naming the field, if the meeting is not for this rank. Raise DeadlinePassed if there is no meeting in
    time."""
    from tba.distributed.process_group import PATIENCE

    look = _at_address if world.port else _by_record
    why = ""
    for _ in looks(PATIENCE.total_seconds(), every=0.2 if world.port else LOOK_EVERY):
        found = look(run, world)
        if not isinstance(found, str):
            return found
        why = found
    raise DeadlinePassed(f"rank {world.rank} has found no rank 0 for {PATIENCE.total_seconds():g} s: {why}")


def _at_address(run: Run, world: "World") -> "tuple[Meeting, int] | str":
    """Look at `MASTER_ADDR`. Return why to look again if rank 0 is not there yet."""
    from tba.distributed.heartbeats import greet
    from tba.distributed.process_group import Meeting, find_group, reach

    store = reach(world.address, world.port)
    if (group := find_group(store)) is None:
        return f"no rank 0 has come to MASTER_ADDR {world.address}, port {world.port}"
    check_group(run, world, group)
    if other := greet(store, world.rank):
        raise ConfigError(f"RANK: {other} has joined attempt {group.attempt} already")
    return Meeting(store, world.address, world.port), group.attempt


def _by_record(run: Run, world: "World") -> "tuple[Meeting, int] | str":
    """Look at the address that the newest attempt has recorded. Return why to look again if nobody is there: the
    attempt may be over, and the next may not have begun."""
    from tba.distributed.heartbeats import greet
    from tba.distributed.process_group import Meeting, find_group, reach

    if (newest := newest_rendezvous(run)) is None:
        return f"attempt {newest_attempt(run)} has recorded no meeting of ranks"
    try:
        socket.create_connection((newest.address, newest.port), CONNECT.total_seconds()).close()
        store = reach(newest.address, newest.port, CONNECT)
        group = find_group(store)
    except (OSError, DeadlinePassed) as error:
        return f"rank 0 of attempt {newest.attempt} does not answer at {newest.address}, port {newest.port}: {error}"
    if group is None:
        return f"rank 0 of attempt {newest.attempt} lets nobody join yet"
    check_group(run, world, group)
    if other := greet(store, world.rank):
        return f"{other} has joined attempt {group.attempt} already, and there is no newer attempt"
    return Meeting(store, newest.address, newest.port), group.attempt


def check_group(run: Run, world: "World", group: "Group") -> None:
    """Raise ConfigError, naming the field, unless a rank of this world may join a group: the group is that of the
    newest attempt, as that attempt has recorded it, and has as many ranks."""
    if (newest := newest_attempt(run)) != group.attempt:
        raise ConfigError(f"attempt: {run.url} is at attempt {newest}, but rank 0 leads attempt {group.attempt}")
    if (recorded := find_rendezvous(run, group.attempt)) is None:
        raise ConfigError(f"attempt: attempt {group.attempt} of {run.url} has recorded no meeting of ranks")
    said: Mapping[str, object] = asdict(recorded)
    for name, value in asdict(group).items():
        if said[name] != value:
            raise ConfigError(
                f"{name}: attempt {group.attempt} of {run.url} has recorded {said[name]!r}, but rank 0 says {value!r}"
            )
    if group.size != world.size:
        raise ConfigError(f"WORLD_SIZE: attempt {group.attempt} has {group.size} ranks, got {world.size}")


def local_world(size: int) -> "World":
    """Return the world of rank 0 if it starts all other ranks itself, on this machine."""
    from tba.distributed.world import LOOPBACK, World

    return World(rank=0, size=size, local_size=size, address=LOOPBACK)
