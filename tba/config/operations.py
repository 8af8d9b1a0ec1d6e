"""Settings of deadlines, sizes and alarms, of metrics, and of where a fork starts."""

from typing import Annotated, Literal

from pydantic import Field

from tba.settings import Count, Patience, Positive, Seconds, Share, settings


@settings
class LimitsConfig:
    """Deadlines of waits and requests, numbers of restarts, and sizes of caches."""

    data_deadline: Seconds = 1800.0
    """Maximum number of seconds that a role waits for another role before it fails. The trainer waits for the initial
    fill, for answers of its replay buffer (always at least 2 minutes), and, with `sync.lag` or `sampling.max_age`, for
    searchers at every sync. A searcher waits for the first version, and, with `sync.lag` or
    `search.rounds_per_version`, for later versions. The evaluator waits for the first version. A role that does no work
    for this long is restarted, and the run fails if a role cannot be started for this long. Raise it if rounds, steps
    or downloads take longer."""
    store_deadline: Seconds = 60.0
    """Maximum number of seconds for one request to the object store, retries included."""
    lease_every: Seconds = 2.0
    """Seconds between two heartbeats of a role, which it writes into its lease. With lower values a dead role is
    noticed sooner, and the store gets more requests."""
    silent_after: Seconds = 15.0
    """Seconds without a heartbeat after which a role counts as silent; at least 3 times `lease_every`. A silent role is
    reported, and restarted where that is possible."""
    orphan_after: Seconds = 600.0
    """Seconds without a heartbeat of the supervisor after which a role stops in order, the trainer with a checkpoint;
    at least 3 times `lease_every`."""
    stop_grace: Seconds = 60.0
    """Minimum number of seconds that a role has for an orderly stop before it is killed. Raise it if roles are killed
    while they are still writing. A role measures how long it needs to stop; if twice this time is more than the
    minimum, the role gets twice this time. The time starts over whenever the role makes progress, but the whole stop
    may take at most four times as long as one such time. A shorter limit from outside, such as Prefect's, still
    applies."""
    max_restarts: Count = 5
    """Maximum number of restarts of one role within `restart_window` seconds, and also of restarts in a row without
    progress. If the role ends once more, the run fails."""
    restart_window: Seconds = 600.0
    """Length in seconds of the time over which `max_restarts` counts restarts."""
    skipped_steps: Count = 10
    """Maximum number of skipped steps in a row. A step is skipped, and updates nothing, if the loss or the gradient is
    not finite. If one more step is skipped, the run fails."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Maximum size, in gigabytes, of the trainer's cache of trajectories in memory. The index of its replay buffer
    comes on top. Trajectories that do not fit are read again whenever they are drawn."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 32.0
    """Maximum size, in gigabytes, of the cache of shards of remote runs on the local disk, under `$TBA_CACHE`. 0 caches
    none."""
    draw_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads that draw batches, in addition to the CPU threads of the gradient step. More threads draw faster. The
    number does not change what is drawn."""


@settings
class AlarmsConfig:
    """Thresholds of alarms. An alarm is an event when it begins and another event when it ends. A threshold of 0
    switches its alarm off."""

    late_after: Patience = 8.0
    """Raise an alarm if a role that may be alive has sent no heartbeat for more than this many seconds."""
    stalled_after: Patience = 300.0
    """Raise an alarm if the trainer has taken no step, or a searcher has stored no shard, for more than this many
    seconds. Slow roles get more time: four times the median time of their last five steps or shards."""
    adopted_within: Patience = 300.0
    """Raise an alarm if a searcher still generates with an old version more than this many seconds after a newer one
    was published. Slow searchers get more time, as with `stalled_after`."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Raise an alarm if fewer gigabytes than this are free on a disk that a role writes to."""
    window: Positive = 20
    """Number of steps over which the alarms `reward_lost` and `equal_rewards` average. With higher values, these alarms
    begin later and are less easily raised by noise."""
    reward_lost: Share = 0.5
    """Raise an alarm if the mean reward of the last `alarms.window` steps has lost more than this share of its gain.
    The gain is the best mean over a window, minus the mean of the first window. A loss within the noise of single
    steps, or below a tenth of the best mean, raises no alarm."""
    equal_rewards: Share = 0.95
    """Raise an alarm if, in the last `alarms.window` steps, at least this share of the groups had the same reward for
    all responses. Such groups teach the policy nothing but to stay close to the reference. Higher values raise the
    alarm more rarely; 0 switches it off."""
    log_ratio: Annotated[float, Field(ge=0, le=1e6)] = 5.0
    """Raise an alarm if the absolute difference between log pi and log pi_ref, summed over the responses that a step
    computes and divided by their number of tokens, is above this many nats. The policy is then far from the reference.
    Never raised where log pi_ref is not computed (`search.reference_logps`)."""
    mismatch: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Raise an alarm if the engine's and the trainer's log-probabilities of whole greedy responses differ by more than
    this many nats on average over an evaluation. The differences are taken without their sign. Higher values raise
    fewer alarms."""


@settings
class StartConfig:
    """Where the run begins. `tba fork` sets this; a run that is not a fork begins at 0."""

    sync: Count = 0
    """The last sync that a fork shares with its parent."""
    step: Count = 0
    """The gradient step that sync `start.sync` follows. The first step of the fork is the next step."""


@settings
class MetricsConfig:
    """Where metrics are sent in addition to the log. SQL views, `tba watch` and the report read the log and need none
    of this."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Whether metrics also go to Weights & Biases. `off`: they do not. `online`: they are sent at once. `offline`: they
    are written to files that `wandb sync` can send later."""
    wandb_project: str = "tba"
    """Name of the Weights & Biases project."""
