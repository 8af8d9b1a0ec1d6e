"""The interfaces between a role and a GPU that roles use one after the other (`model.gpu_shifts`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


class Shift(Protocol):
    """The times in which one role has the GPU. What the role holds on the GPU is there only during its shifts."""

    is_shared: bool
    """False if no other role waits for the GPU, so that shifts need not end."""

    def hold(self, *things: object) -> None:
        """Park these things whenever a shift ends, those of them that are `Parks`."""
        ...

    def begin(self) -> None:
        """Wait until the GPU is free, and move back to it what was parked. Do nothing during a shift."""
        ...

    def end(self) -> None:
        """Park what this role holds, and leave the GPU to other roles. Do nothing between shifts."""
        ...


@runtime_checkable
class Parks(Protocol):
    """Holds memory of a GPU, and can keep its content in main memory for a while."""

    def park(self) -> None: ...

    def unpark(self) -> None:
        """Move back what `park` has moved. This is called before anything else is, and only after `park`."""
        ...


@runtime_checkable
class LendsModels(Protocol):
    """A task that says which models it has loaded, so that they leave the GPU between shifts."""

    def loaded_models(self) -> "Sequence[nn.Module]": ...


class NoShifts:
    """The shift of a role that has its GPU, or its part of it, all the time."""

    is_shared = False

    def hold(self, *things: object) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


NO_SHIFTS = NoShifts()
