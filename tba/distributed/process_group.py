"""How the ranks of a trainer meet and become one process group of torch.

Ranks meet at a store of torch, which rank 0 opens, or torchrun's agent. Rank 0 writes there which group of ranks it
leads. A rank that finds another group than the one it was started for does not join.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist

from tba.distributed.ranks import Ranks
from tba.distributed.world import LOOPBACK, World, address_for_others, interface_of, own_address_towards
from tba.errors import ConfigError, DeadlinePassed

PATIENCE = timedelta(minutes=10)  # how long a rank waits until the others join, or make the same call

_GROUP, _GLOO = "tba/group", "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group of ranks of one attempt. All ranks of a group name the same group."""

    attempt: int
    size: int
    token: str  # a random name, which no other group has


@dataclass(frozen=True)
class Meeting:
    """A store at which ranks have met, and its address."""

    store: dist.TCPStore
    address: str
    port: int


def open_meeting(world: World) -> Meeting:
    """Open the store at which the ranks meet, or connect to that of torchrun's agent. Only rank 0 does so. The store
    lets anybody in, so it listens only at the address at which the other ranks look for it."""
    address = world.address or (LOOPBACK if world.is_local else address_for_others(os.environ.get(_GLOO, "")))
    if world.agent:
        store = reach(address, world.port)
    else:
        with _listen(address, world.port, reachable=not world.is_local) as listener:
            store = dist.TCPStore(
                address, listener.getsockname()[1], world.size, is_master=True, wait_for_workers=False,
                timeout=PATIENCE, master_listen_fd=listener.detach(),
            )  # fmt: skip
    return Meeting(store, address, store.port)


def admit(meeting: Meeting, group: Group) -> None:
    """Let the ranks of this group join. Only rank 0 does so."""
    meeting.store.set(_GROUP, json.dumps(asdict(group)))


def _listen(address: str, port: int, *, reachable: bool) -> socket.socket:
    """Listen at an address. If other machines have to reach it, refuse one of loopback."""
    try:
        family, kind, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if reachable and ip_address(place[0]).is_loopback:
            raise ConfigError(
                f"MASTER_ADDR: {address} is {place[0]} on this machine, which no other machine can reach; name an "
                "address of a network, or set LOCAL_WORLD_SIZE to WORLD_SIZE if all ranks are on this machine"
            )
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR: rank 0 cannot listen at {address}, port {port or 'any'}: {error.strerror or error}; rank 0 "
            "must run on the machine that MASTER_ADDR names, and nothing else may use MASTER_PORT"
        ) from error
    return listener


def reach(address: str, port: int, patience: timedelta = PATIENCE) -> dist.TCPStore:
    """Connect to the store at an address. Raise DeadlinePassed if nobody answers there in time."""
    try:
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
    except dist.DistError as error:
        seconds = patience.total_seconds()
        raise DeadlinePassed(f"no rank 0 has answered at {address}, port {port}, for {seconds:g} s") from error


def find_group(store: dist.TCPStore) -> Group | None:
    """Return the group that may join at a store; None if rank 0 has not written it yet."""
    return Group(**json.loads(store.get(_GROUP))) if store.check([_GROUP]) else None


def join(world: World, meeting: Meeting, device: torch.device, *, parts: int = 0) -> Ranks:
    """Join the process group, and return once all ranks have joined. Tensors on GPUs are sent by NCCL, tensors in main
    memory by gloo. Raise ConfigError, at all ranks, if they want to divide weights into different numbers of parts."""
    _choose_interface(world, meeting)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("tba/torch", meeting.store),
        rank=world.rank,
        world_size=world.size,
        timeout=PATIENCE,
        device_id=device if on_gpu else None,
    )
    ranks = Ranks(world.rank, world.size, parts)
    most, least = ranks.most([ranks.parts, -ranks.parts])
    if most != -least:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE must be equal on all machines where training.copy_per is 'node', got {-least} and {most}"
        )
    return ranks


def _choose_interface(world: World, meeting: Meeting) -> None:
    """Let gloo use the interface by which this rank reaches rank 0. By default gloo uses the address of the host's
    name, which may be wrong, or one that a network reaches although all ranks are on this machine."""
    if world.is_local:
        os.environ[_GLOO] = "lo"
    elif _GLOO not in os.environ:
        own = own_address_towards(meeting.address, meeting.port)
        if own and ip_address(own).is_loopback:
            raise ConfigError(
                f"{_GLOO} must be set: this machine reaches MASTER_ADDR {meeting.address} by loopback, so this does "
                "not say by which network it reaches the other ranks"
            )
        if own and (interface := interface_of(own)):
            os.environ[_GLOO] = interface


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
