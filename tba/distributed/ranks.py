"""Ranks: the processes that a trainer is spread over. Each rank learns from its share of the groups in a batch.

All ranks must make the calls in which they communicate in the same order. Otherwise they wait for each other forever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tba.batches.batching import Batch, groups_at

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class Share(NamedTuple):
    """The groups of a batch that one rank learns from, and their positions in the batch. A rank without groups of its
    own gets a group of another rank, with `counts` false: it takes part in the computation, but its results do not
    count."""

    slots: Sequence[int]
    batch: Batch
    counts: bool = True


@dataclass(frozen=True)
class Ranks:
    """The number of this rank, and the number of all ranks. A single rank does not communicate.

    The weights and what belongs to them are divided among all ranks or, if `parts` is set, among so many ranks with
    consecutive numbers. The ranks after them then hold another copy."""

    rank: int = 0
    size: int = 1
    parts: int = 0  # set by __post_init__ if it is 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", self.parts or self.size)

    @property
    def part(self) -> int:
        """The number of the part that this rank holds of each weight."""
        return self.rank % self.parts

    @property
    def stores(self) -> bool:
        """True if this rank stores its part in checkpoints. Of several copies, only the first is stored."""
        return self.rank < self.parts

    def share(self, batch: Batch) -> Share:
        if self.size == 1:
            return Share(range(batch.groups), batch)
        slots = shares(_tokens(batch), self.size)[self.rank]
        return Share(slots, groups_at(batch, slots)) if slots else Share([0], groups_at(batch, [0]), counts=False)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of values over all ranks. All ranks must pass the same names."""
        if self.size == 1:
            return dict(values)
        names = sorted(values)
        sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def most(self, counts: Sequence[int]) -> list[int]:
        """Return the maximum of each count over all ranks."""
        if self.size == 1:
            return list(counts)
        maxima = torch.tensor(counts)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    def add_up(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


ALONE = Ranks()


def shares(costs: Sequence[int], size: int) -> list[list[int]]:
    """Return the groups that each rank takes, one list per rank. `costs` has the number of tokens of each group. Ranks
    get about equally many tokens, and about equally many groups, so that they have equally many micro-batches. Groups
    with more tokens are given out first, each to the rank that has the fewest tokens."""
    chosen, load = [list[int]() for _ in range(size)], [0] * size
    room = -(-len(costs) // size)
    for group in sorted(range(len(costs)), key=lambda group: (-costs[group], group)):
        rank = min((it for it in range(size) if len(chosen[it]) < room), key=lambda it: (load[it], it))
        chosen[rank].append(group)
        load[rank] += costs[group]
    return [sorted(groups) for groups in chosen]


def _tokens(batch: Batch) -> list[int]:
    """Return the number of tokens of each group."""
    k = batch.responses_per_prompt
    return [sum(batch.lengths[first : first + k]) for first in range(0, len(batch.lengths), k)]


def rows_of(rank: int, size: int, total: int) -> range:
    """Return the rows that a rank holds of a weight with `total` rows."""
    each = -(-total // size)
    return range(min(rank * each, total), min((rank + 1) * each, total))


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor, gathered from all ranks. All ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """True if this rank holds only a part of a tensor."""
    return isinstance(tensor, DTensor)


def by_kind(tensors: Sequence[AnyTensor]) -> list[list[AnyTensor]]:
    """Divide tensors into those that are sharded and those that are not, because torch cannot compute with both at
    once. If all are alike, return one list."""
    kinds = [[it for it in tensors if is_sharded(it) == sharded] for sharded in (True, False)]
    return [kind for kind in kinds if kind]


def held(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value`, the rows that this rank holds, as its part of a distributed tensor with the parameter's shape. If
    the parameter is not distributed, or `value` is a single number, return `value` itself."""
    if not isinstance(parameter, DTensor) or not value.ndim:
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def at_rest(model: nn.Module) -> None:
    """Free the whole weights that a forward pass has gathered. This is needed if no backward pass follows, which would
    free them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather(module: nn.Module) -> None:
    """Gather the weights of a module that are outside of its blocks, so that its parts can be called by themselves.
    Blocks gather theirs when they are called."""
    if isinstance(module, FSDPModule):
        module.unshard()
