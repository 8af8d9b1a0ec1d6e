"""The metrics that `tba metrics` exports. Names, units and labels follow the conventions of Prometheus.

Every metric also has the label `root`, and all but those of a root have the label `run`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_VALUES = 100
"""Values of a label that come from a run, such as kinds of events. More values than these share the value `other`."""

MOST_SEARCHERS = 1000
"""Searchers with series of their own, the first by number. `tba_roles` counts all searchers."""


@dataclass(frozen=True)
class Metric:
    name: str  # as it is written in queries
    meaning: str
    labels: tuple[str, ...] = ()  # beside root and run

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


_INDEX = ("role", "index")

OF_A_ROOT = (
    Metric("tba_up", "1 if the root could be listed in time and has runs, else 0"),
    Metric("tba_root_runs", "runs under the root, those that ended long ago included"),
)

OF_A_RUN = (
    Metric("tba_run_up", "1 if the run was read in time, else 0; then the run has no other metric"),
    Metric("tba_run_read_seconds", "time that the last reading of the run took"),
    Metric("tba_run_damaged_objects", "objects that were damaged or missing when they were read, and are left out"),
    Metric("tba_run_info", "always 1; the labels describe the run", ("task", "objective")),
    Metric("tba_run_state", "1 for the state that the run is in, 0 for all others", ("state",)),
    Metric("tba_run_step", "newest gradient step"),
    Metric("tba_run_planned_steps", "gradient steps that the run is to take"),
    Metric("tba_run_version", "newest version that searchers can adopt"),
    Metric("tba_run_attempts", "lives of the trainer, those of a fork's parent included"),
    Metric("tba_run_searchers_wanted", "searchers that the run is to have; `tba scale` changes it"),
    Metric("tba_roles", "roles of a kind in a state: alive, silent, finished, stopped or failed", ("role", "state")),
    Metric("tba_role_up", "1 if the role is alive: it has not ended, and its lease is fresh", _INDEX),
    Metric("tba_role_lease_age_seconds", "time since the role renewed its lease, by both clocks", _INDEX),
    Metric("tba_role_quiet_seconds", "time since the work of the role gave a sign of life", _INDEX),
    Metric("tba_role_life", "lives of the role so far; it grows at each restart", _INDEX),
    Metric("tba_role_free_disk_bytes", "free space on the fullest disk that the role writes to, until it ends", _INDEX),
    Metric("tba_searcher_tokens_total", "tokens of responses that this life of the searcher has stored", ("index",)),
    Metric("tba_searcher_trajectories_total", "trajectories that this life of the searcher has stored", ("index",)),
    Metric("tba_searcher_shards_total", "shards that the searcher has stored in all its lives", ("index",)),
    Metric("tba_searcher_version", "version with which the searcher generates, until it ends", ("index",)),
    Metric("tba_searcher_seconds_total", "time of this life of the searcher, by part of its work", ("index", "part")),
    Metric("tba_syncs_total", "sync records"),
    Metric("tba_sync_timestamp_seconds", "time of the newest sync record"),
    Metric("tba_admitted_shards_total", "shards that sync records have admitted"),
    Metric("tba_admitted_trajectories_total", "trajectories that sync records have admitted"),
    Metric("tba_admitted_bytes_total", "size of the shards that sync records have admitted"),
    Metric("tba_refused_shards_total", "objects that sync records have refused as faulty"),
    Metric("tba_waiting_shards", "shards that searchers have stored and no sync record names yet"),
    Metric("tba_stored_bytes", "size of what is stored now: versions or checkpoints", ("kind",)),
    Metric("tba_trainer_steps_total", "gradient steps in the ledger, those that were taken again included"),
    Metric("tba_trainer_tokens_total", "tokens of responses that the trainer has learned from"),
    Metric("tba_trainer_skipped_steps_total", "gradient steps that updated nothing: something was not finite"),
    Metric("tba_trainer_step_seconds_total", "time of the gradient steps in the ledger"),
    Metric("tba_trainer_part_seconds_total", "time of the trainer by part; wait, backlog, shift are idle", ("part",)),
    Metric("tba_step_loss", "loss of the newest step"),
    Metric("tba_step_residual_abs", "mean absolute residual of the newest step"),
    Metric("tba_step_log_z", "mean log Z of the newest step"),
    Metric("tba_step_log_ratio_mean", "mean log π − log π_ref of a response in the newest step"),
    Metric("tba_step_grad_norm", "norm of the gradient of the newest step"),
    Metric("tba_step_learning_rate", "learning rate of the newest step"),
    Metric("tba_step_beta", "beta of the newest step"),
    Metric("tba_step_reward_mean", "mean reward of the responses of the newest step"),
    Metric("tba_step_equal_rewards_ratio", "share of groups of the newest step with equal rewards"),
    Metric("tba_step_age_mean_steps", "mean age of the responses of the newest step"),
    Metric("tba_step_age_max_steps", "greatest age of a response of the newest step"),
    Metric("tba_step_recent_ratio", "share of the newest step's draws from the newest sync"),
    Metric("tba_evaluations_total", "versions that were scored"),
    Metric("tba_evaluation_seconds_total", "time that scoring took"),
    Metric("tba_evaluation_version", "newest version with a score"),
    Metric("tba_evaluation_score", "score of that version", ("metric",)),
    Metric("tba_events_total", "events of all roles", ("kind", "severity")),
    Metric("tba_alarms", "alarms that hold now; 0 if no role is alive", ("kind",)),
)  # fmt: skip

STEP = {
    "loss": "tba_step_loss", "residual_abs": "tba_step_residual_abs", "log_z": "tba_step_log_z",
    "log_ratio_mean": "tba_step_log_ratio_mean", "grad_norm": "tba_step_grad_norm", "lr": "tba_step_learning_rate",
    "beta": "tba_step_beta", "reward_mean": "tba_step_reward_mean", "equal_rewards": "tba_step_equal_rewards_ratio",
    "age_mean": "tba_step_age_mean_steps", "age_max": "tba_step_age_max_steps", "recent_share": "tba_step_recent_ratio",
}  # fmt: skip
"""For each metric of a gradient step, as the ledger names it, the metric that shows its newest value."""

METRICS = {metric.name: metric for metric in (*OF_A_ROOT, *OF_A_RUN)}


class Values:
    """Values of metrics, each with the values of the metric's own labels."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a value. None, for a value that is unknown, sets nothing."""
        if value is not None:
            assert len(labels) == len(METRICS[name].labels)
            self._values.setdefault(name, {})[labels] = float(value)

    def set_all(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set the values of a metric whose labels come from a run. Of more than `MOST_VALUES` values, add up the last
        as `other`."""
        for number, (labels, value) in enumerate(sorted(values.items())):
            labels = labels if number < MOST_VALUES else ("other",) * len(labels)
            self.set(name, self._values.get(name, {}).get(labels, 0.0) + value, *labels)

    def __iter__(self) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        for name, values in self._values.items():
            for labels, value in values.items():
                yield METRICS[name], labels, value
