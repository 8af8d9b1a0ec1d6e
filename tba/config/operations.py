"""Settings of deadlines, sizes and alarms, of metrics, and of where a fork starts."""

from typing import Annotated, Literal

from pydantic import Field

from tba.settings import Count, Patience, Positive, Seconds, Share, settings


@settings
class LimitsConfig:
    """Deadlines of everything that waits, and sizes of everything that is cached."""

    data_deadline: Seconds = 1800.0
    """Seconds that a role waits for data before it fails: the trainer for its initial fill, a searcher for its first
    version or, with `search.rounds_per_version`, for the next one, both sides for each other with `sync.lag`, and the
    trainer for an answer of its replay buffer, which always has at least 2 minutes."""
    store_deadline: Seconds = 60.0
    """Seconds for one request to the object store, retries included."""
    lease_every: Seconds = 2.0
    """Seconds between two heartbeats of a role."""
    silent_after: Seconds = 15.0
    """Seconds without a heartbeat after which a role counts as silent. It is then reported, and restarted where that is
    possible."""
    orphan_after: Seconds = 600.0
    """Seconds without a supervisor after which a role makes a checkpoint and stops."""
    stop_grace: Seconds = 60.0
    """Minimum number of seconds that a role has for an orderly stop before it is killed. Raise it if roles are killed
    while they are still writing. A role that measures that it needs longer gets twice the time that it measures, and as
    much again while it makes progress, up to four times in all. A shorter limit that somebody else sets, such as
    Prefect, still applies."""
    max_restarts: Count = 5
    """Maximum number of restarts of one role within `restart_window`. One more fails the run."""
    restart_window: Seconds = 600.0
    """Seconds over which `max_restarts` counts."""
    skipped_steps: Count = 10
    """Maximum number of steps in a row that update nothing because the loss or the gradient is not finite. One more
    fails the run."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Gigabytes of trajectories that the trainer caches in memory, in addition to the index of its replay buffer. Other
    trajectories are read again when they are drawn."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 32.0
    """Gigabytes of shards of remote runs that are cached on the local disk, under `$TBA_CACHE`. 0 caches none."""
    draw_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads that draw batches, in addition to those of the gradient step. The number does not change what is
    drawn."""


@settings
class AlarmsConfig:
    """When a role raises an alarm. An alarm is an event when it begins and another when it ends. 0 switches an alarm
    off."""

    late_after: Patience = 8.0
    """Seconds without a heartbeat of a role that is alive."""
    stalled_after: Patience = 300.0
    """Seconds without a step of the trainer, or without a new shard of a searcher."""
    adopted_within: Patience = 300.0
    """Seconds that a searcher may take to load a version that is newer than its own."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Free gigabytes on a disk that a role writes to. The alarm is raised when less is left."""
    window: Positive = 20
    """Number of steps that the next two alarms look back on."""
    reward_lost: Share = 0.5
    """Share of its best gain that the mean reward of batches may lose. A loss within the noise of single steps, or
    below a tenth of the mean reward, raises no alarm."""
    equal_rewards: Share = 0.95
    """Share of groups in which all responses have the same reward. Such groups teach nothing but the reference."""
    log_ratio: Annotated[float, Field(ge=0, le=1e6)] = 5.0
    """Absolute value of log pi - log pi_ref, in nats per token, over the responses of a step."""
    mismatch: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Difference between the log-probabilities of the engine and those of the trainer, in nats per response."""


@settings
class StartConfig:
    """Where the run begins. `tba fork` sets this; a run that is not a fork begins at 0."""

    sync: Count = 0
    """The last sync that a fork shares with its parent."""
    step: Count = 0
    """The step that this sync follows. The first step of the fork is the next one."""


@settings
class MetricsConfig:
    """Where metrics are sent in addition to the log. Views, `tba watch` and the report do not need it."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Whether metrics also go to Weights & Biases: `online` sends them at once, `offline` writes files that `wandb
    sync` sends later."""
    wandb_project: str = "tba"
    """Name of the Weights & Biases project."""
