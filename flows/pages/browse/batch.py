"""The batch of a step: which responses it drew, slot by slot, and whether the step made each response more or less
probable."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.pages.browse.run_snapshot import RunSnapshot

BATCH = """
with drawn as (select * from draws_all where sync = {sync} and step = {step} and attempt = {attempt})
select drawn.* exclude (prompt_id), t.prompt_id, left(t.prompt, 2000) as prompt,
    left(t.response, 2000) as response, t.reward, t.length, t.finished,
    t.version_start, t.version_start_attempt
from drawn join (
    select trajectory_id, prompt_id, prompt, response, reward, length, finished, version_start, version_start_attempt
    from trajectories where {pruned}
) t using (trajectory_id)
order by slot, position
"""
SHARDS = """
select split_part(trajectory_id, '/', 1)::int as searcher, split_part(trajectory_id, '/', 2)::int as seq, count(*)
from draws_all where sync = {sync} and step = {step} and attempt = {attempt} group by 1, 2
"""


@dataclass(frozen=True)
class Drawn:
    """A response that the step drew in a slot, and how many times it was drawn there."""

    row: dict[str, Any]
    times: int

    @property
    def push(self) -> float:
        """How far the step moved the response: its advantage in the loss, times its draws; 0 without an advantage."""
        return (self.row["advantage"] or 0.0) * self.times

    @property
    def log_ratio(self) -> float | None:
        """The log-ratio of the response: its log-probability under the policy of the step minus that under the
        reference."""
        logp, reference = self.row["logp"], self.row["ref_logp"]
        return None if logp is None or reference is None else logp - reference

    def target(self, beta: float | None) -> float | None:
        """Return the log-ratio that a balancing objective aims at for this response. None if reward and log Z do not
        determine it, because the objective uses a tempered target or another log-ratio."""
        row, log_ratio = self.row, self.log_ratio
        if log_ratio is None or row["residual"] is None or row["log_z"] is None or not beta:
            return None
        target, expected = log_ratio - row["residual"], row["reward"] / beta - row["log_z"]
        return target if abs(target - expected) <= 0.05 * (1 + abs(expected)) else None


def beta_of_targets(config: Mapping[str, Any], beta: float | None) -> float | None:
    """Return the beta of a step if the targets of its responses follow from beta, reward and log Z. Return None if they
    also depend on the policies that sampled (`objective.behaviour_share`)."""
    return None if config.get("objective", {}).get("behaviour_share") else beta


Slot = list[Drawn]


@dataclass(frozen=True)
class Batch:
    slots: list[Slot]
    missing: int = 0  # draws whose responses cannot be read, because their shards are gone or damaged

    def __iter__(self) -> Iterator[Drawn]:
        return (drawn for slot in self.slots for drawn in slot)

    @property
    def draws(self) -> int:
        return sum(drawn.times for drawn in self)

    def most_raised(self, most: int) -> list[Drawn]:
        return [it for it in sorted(self, key=lambda it: it.push, reverse=True)[:most] if it.push > 0]

    def most_lowered(self, most: int) -> list[Drawn]:
        return [it for it in sorted(self, key=lambda it: it.push)[:most] if it.push < 0]


def mean_reward(slot: Slot) -> float:
    """Return the mean reward of the draws of a slot."""
    return sum(it.row["reward"] * it.times for it in slot) / sum(it.times for it in slot)


def read_batch(snapshot: RunSnapshot, place: dict[str, int]) -> Batch:
    """Read the batch of a step. Only the shards that hold responses of the batch are opened."""
    shards = snapshot.ask(SHARDS.format(**place)).rows
    searchers, seqs = (",".join(map(str, sorted({shard[n] for shard in shards}))) or "-1" for n in (0, 1))
    pruned = f"searcher in ({searchers}) and seq in ({seqs}) and trajectory_id in (select trajectory_id from drawn)"
    rows = snapshot.rows(BATCH.format(**place, pruned=pruned))
    grouped: defaultdict[int, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for row in rows:
        grouped[row["slot"]].setdefault(row["trajectory_id"], []).append(row)
    slots = [[Drawn(found[0], len(found)) for found in grouped[slot].values()] for slot in sorted(grouped)]
    return Batch(slots, sum(draws for _, _, draws in shards) - len(rows))
