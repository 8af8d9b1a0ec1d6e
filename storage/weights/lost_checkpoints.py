"""Errors for a run that has no checkpoint to continue from. Each error says what the user can do."""

from collections.abc import Mapping

from storage.runs.retention import RetentionRecord
from storage.runs.run import Run
from storage.weights.checkpoints import recorded_step
from tba.errors import Damaged
from tba.types import Version

_NAMED = 3  # number of damaged checkpoints that an error describes; events describe all of them


def no_start(run: Run) -> Damaged:
    """Return the error for a fork that has no checkpoint: neither the one that it starts from nor one of its own."""
    assert run.parent
    gone = f"{run.url} starts from the checkpoint of sync {run.parent.sync}, which is gone"
    return Damaged(f"{gone}: restore it and resume, or {_fork_again(run)}")


def none_intact(run: Run, damaged: Mapping[Version, Damaged], given_up: RetentionRecord | None = None) -> Damaged:
    """Return the error for a run without an intact checkpoint. `damaged` has its damaged checkpoints, newest first.
    `given_up` is the retention record that removed tokens which steps after an older checkpoint would draw, if there is
    one."""
    reasons = [f"{checkpoint}: {error}" for checkpoint, error in damaged.items()]
    more = [f"and {len(reasons) - _NAMED} more"] if len(reasons) > _NAMED else []
    why = "; ".join([*reasons[:_NAMED], *more])
    if given_up:
        why += f"; no older checkpoint can be used, because {given_up} has given up tokens that its steps would draw"
    fork = [_fork_again(run)] if run.parent else [] if given_up else [_fork_from_start(run, next(iter(damaged)))]
    ways = ["restore the file that is named and resume", *fork, "start a new run"]
    return Damaged(f"{run.url}: no checkpoint is intact ({why}). What you can do: {', or '.join(ways)}")


def _fork_again(run: Run) -> str:
    assert run.parent
    replay = " --replay" if run.parent.replays is not None else ""
    again = f"fork its parent again: `tba fork {run.parent.run} --step {run.parent.step}{replay}`"
    return f"{again} (or at another step, if the checkpoint of this step is damaged)" if run.parent.sync else again


def _fork_from_start(run: Run, newest: Version) -> str:
    step = recorded_step(run, newest.number)
    up_to = "N" if step is None else step
    return f"repeat the steps up to {up_to} in a new run: `tba fork {run.name} --step {up_to}`"
