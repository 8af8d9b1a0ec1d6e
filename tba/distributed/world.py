"""The place of a process among the ranks of a trainer, in the environment variables that torchrun sets."""

import fcntl
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from tba.errors import ConfigError

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface


@dataclass(frozen=True, kw_only=True)
class World:
    """The variables that torchrun sets for each process that it starts. Other programs that start ranks set the same
    variables; without an address, a rank learns from the run's storage where rank 0 is."""

    rank: int  # RANK: the number of this rank, from 0
    size: int  # WORLD_SIZE: the number of all ranks
    local_rank: int = 0  # LOCAL_RANK: the number of this rank on its machine, and the number of its GPU
    local_size: int = 1  # LOCAL_WORLD_SIZE: the number of ranks on this machine
    address: str = ""  # MASTER_ADDR: the machine of rank 0
    port: int = 0  # MASTER_PORT: the port of the store at which ranks meet
    agent: bool = False  # TORCHELASTIC_USE_AGENT_STORE: True if torchrun opens the store, and not rank 0

    @property
    def is_local(self) -> bool:
        """True if all ranks are on this machine."""
        return self.local_size == self.size

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Self:
        """Read the variables. Raise ConfigError, naming the variable, if one is missing or wrong."""
        size = _number(variables, "WORLD_SIZE", low=1, high=1024)
        local_size = _number(variables, "LOCAL_WORLD_SIZE", low=1, high=size, default=1)
        address = variables.get("MASTER_ADDR", "")
        world = cls(
            rank=_number(variables, "RANK", high=size - 1),
            size=size,
            local_rank=_number(variables, "LOCAL_RANK", high=size - 1, default=0),
            local_size=local_size,
            address=address,
            port=_number(variables, "MASTER_PORT", high=65535, default=0),
            agent=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if world.port and not address:
            raise ConfigError(f"MASTER_ADDR must be set where MASTER_PORT is {world.port}")
        return world

    def variables(self) -> dict[str, str]:
        """Return the variables that `of` reads."""
        said = {
            "RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size, "MASTER_ADDR": self.address, "MASTER_PORT": self.port,
            "TORCHELASTIC_USE_AGENT_STORE": self.agent,
        }  # fmt: skip
        return {name: str(value) for name, value in said.items()}


def _number(variables: Mapping[str, str], name: str, *, low: int = 0, high: int, default: int | None = None) -> int:
    said = variables.get(name, "")
    if not said and default is not None:
        return default
    if not (said.isascii() and said.isdigit() and low <= int(said) <= high):
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {said or 'nothing'}")
    return int(said)


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an IPv4 address; None if no interface has it, or if this
    system cannot say."""
    for _, name in socket.if_nameindex():
        if address_of(name) == address:
            return name
    return None


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface of this machine; None if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def own_address_towards(address: str, port: int) -> str | None:
    """Return the address that this machine uses to reach another one; None if there is no way. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((address, port or 1))
        return asking.getsockname()[0]
    return None


def address_for_others(interface: str = "") -> str:
    """Return an address of this machine that other machines can reach: that of the interface, if one is named, else
    the address of the host's name. Raise ConfigError if only this machine itself can reach the address."""
    with suppress(OSError):
        found = address_of(interface) if interface else socket.gethostbyname(socket.gethostname())
        if found and not found.startswith("127."):
            return found
    if interface:
        raise ConfigError(f"GLOO_SOCKET_IFNAME: this machine has no interface {interface!r} with an IPv4 address")
    raise ConfigError(
        f"MASTER_ADDR must be set: the name of this machine, {socket.gethostname()}, has no address that another "
        "machine can reach"
    )
