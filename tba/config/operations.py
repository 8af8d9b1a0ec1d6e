"""Settings of deadlines, sizes and alarms, of metrics, and of where a fork starts."""

from typing import Annotated, Literal

from pydantic import Field

from tba.config.fields import Count as Count
from tba.config.fields import Patience as Patience
from tba.config.fields import Positive as Positive
from tba.config.fields import Seconds as Seconds
from tba.config.fields import Share as Share
from tba.config.fields import settings as settings


@settings
class LimitsConfig:
    """Every wait has a deadline, and what is kept at hand has a size; these are they."""

    data_deadline: Seconds = 1800.0
    """For the trainer to see its initial fill, and a searcher its first version, or, with `search.rounds_per_version`,
    the next; where they go in step, for each round and version that the other side owes; and for an answer of the
    trainer's reader, which has 2 minutes at least."""
    store_deadline: Seconds = 60.0
    """For one request to the object store, retries included."""
    lease_every: Seconds = 2.0
    """Between two signs of life of a role."""
    silent_after: Seconds = 15.0
    """A role whose lease has not moved for this long is reported, and restarted where that is possible."""
    orphan_after: Seconds = 600.0
    """A role that sees no supervisor for this long makes a checkpoint and stops."""
    stop_grace: Seconds = 60.0
    """The shortest time that a role has to stop in order before it is ended by force. Raise it if roles are ended by
    force while they still store something. A role that measures that it needs longer gets twice the time that it
    measures, and again as long as it makes progress, up to four times that in all. A limit that somebody else sets, as
    Prefect does, always counts."""
    max_restarts: Count = 5
    """Of one role within `restart_window`; one more fails the run."""
    restart_window: Seconds = 600.0
    """For `max_restarts`."""
    skipped_steps: Count = 10
    """Steps in a row, of one life of the trainer, that may update nothing because their loss or gradient is not finite;
    one more fails the run."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Of trajectories that the trainer keeps in memory, beside the index of its replay buffer; others are read again
    when they are drawn."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 32.0
    """Of shards of remote runs that are kept on this machine's disk, under `$TBA_CACHE`; 0 keeps none."""
    draw_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads that draw batches, beside those of the gradient step; what is drawn does not depend on them."""


@settings
class AlarmsConfig:
    """What is told as soon as it goes wrong, in events when it begins and when it is over; 0 leaves an alarm out."""

    late_after: Patience = 8.0
    """For the lease of a role that lives: seconds without a sign of it."""
    stalled_after: Patience = 300.0
    """For the trainer to take a step, and for a searcher to append a shard."""
    adopted_within: Patience = 300.0
    """For a searcher to take a version once a newer one than its own is published."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Left on any disk that a role writes to."""
    window: Positive = 20
    """Steps that the next two look back on."""
    reward_lost: Share = 0.5
    """Of what the mean reward of batches had gained at its best; less than its steps differ among each other, or than a
    tenth of it, is no loss."""
    equal_rewards: Share = 0.95
    """Of groups whose responses all have the same reward."""
    log_ratio: Annotated[float, Field(ge=0, le=1e6)] = 5.0
    """log π − log π_ref of a step's responses, in nats a token and without its sign."""
    mismatch: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """How far an engine's log-probabilities are from the trainer's, in nats a response."""


@settings
class StartConfig:
    """Where a run begins. `tba fork` sets it; a run that is no fork begins at the start."""

    sync: Count = 0
    """The last sync that a fork shares with its parent."""
    step: Count = 0
    """The step that sync follows: the fork's own first step is the next."""


@settings
class MetricsConfig:
    """What is told elsewhere; views, `tba watch` and the report need none of it."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Whether curves go to Weights & Biases too: at once, or into files to send later."""
    wandb_project: str = "tba"
    """Under which name there."""
