"""Orders from rank 0 to the other ranks, and their answers, through the process group of torch.

Rank 0 sends each order to all other ranks at once. A rank may wait for its next order as long as rank 0 lives
(tba/distributed/heartbeats.py); every other call has a deadline. Messages are JSON and numbers, and never pickled.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tba.distributed.process_group import PATIENCE
from tba.runtime.messages import Numbers, pack, unpack

END = "end"
"""The order after which there are no more."""

_FOREVER = timedelta(days=3650)


class Order(NamedTuple):
    what: str
    said: Any
    numbers: Numbers


def send_order(what: str, said: Any = None, numbers: Numbers = (), *, patience: timedelta = PATIENCE) -> None:
    """Send an order of rank 0 to all other ranks. Raise RuntimeError if a rank does not take the order in time, or has
    ended."""
    message = torch.frombuffer(bytearray(pack({"do": what, "with": said}, numbers)), dtype=torch.uint8)
    _broadcast(torch.tensor([message.numel()]), patience)
    _broadcast(message, patience)


def next_order() -> Order:
    """Wait for the next order of rank 0 and return it. Raise RuntimeError if rank 0 has ended."""
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length, _FOREVER)
    message = torch.empty(int(length), dtype=torch.uint8)
    _broadcast(message, PATIENCE)
    order, numbers = unpack(message.numpy().data)
    return Order(order["do"], order["with"], numbers)


def answer(said: Any) -> None:
    """Answer rank 0 that this rank has carried out its order."""
    _gather(torch.frombuffer(bytearray(pack(said)), dtype=torch.uint8))


def answers() -> list[Any]:
    """Return to rank 0 the answers of all other ranks, in the order of their numbers. Raise RuntimeError if a rank
    does not answer in time, or has ended."""
    found = _gather(torch.zeros(0, dtype=torch.uint8))
    return [unpack(message.numpy().data)[0] for message in found[1:]]


def _broadcast(tensor: torch.Tensor, patience: timedelta) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, patience
    group = dist.group.WORLD
    assert group
    group.broadcast([tensor], options).wait()


def _gather(mine: torch.Tensor) -> list[torch.Tensor]:
    """Return the messages of all ranks at rank 0, and nothing at the other ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([mine.numel()]))
    longest = max(map(int, lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    if dist.get_rank():
        dist.gather(padded)
        return []
    found = [torch.empty_like(padded) for _ in lengths]
    dist.gather(padded, found)
    return [message[: int(length)] for message, length in zip(found, lengths, strict=True)]
