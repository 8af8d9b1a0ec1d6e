"""A trainer learns: it draws batches from the replay buffer, steps on the loss, and syncs every k steps.

Two threads with one job each, and those of tba/syncing.py; nothing is shared between them but finished values:

    reader   record of sync n (once step n x k has begun) -> draw -> fetch -> collate, one batch ahead
    main     forward, backward, step; a copy of all that at each sync
    syncing  ledger, version and checkpoint of sync n, from the copy

Order at a sync: record, ledger, checkpoint. A crash between any two of them is made good by the next attempt, which
takes the steps since the newest checkpoint again, on the same records.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba.batching import Batch, collate, micro_batches
from tba.config import Config
from tba.errors import ConfigError, DeadlinePassed, RunFailed, Stopped
from tba.interfaces import CheckpointStore, Lease, Ledger, MetricLog, ReplayBuffer, VersionStore
from tba.logprobs import response_logps
from tba.objectives import Loss, trajectory_balance
from tba.policy import Policy
from tba.schedules import beta_at, learning_rate_at
from tba.syncing import Copy, SyncWriter
from tba.timing import timed
from tba.training_state import TrainingState, restore_optimizer
from tba.types import Draw, Metrics, Outcome, StepRecord, Version


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the reader thread hands over: a batch, and how it came about."""

    batch: Batch
    draws: Sequence[Draw]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a step found: for each drawn row, and in all."""

    outcomes: Sequence[Outcome]
    metrics: Metrics


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        attempt: int,
        policy: Policy,
        buffer: ReplayBuffer,
        ledger: Ledger,
        versions: VersionStore,
        checkpoints: CheckpointStore,
        metrics: MetricLog,
        lease: Lease,
        scratch: Path,
    ):
        _check_objective(config)
        self.config, self.attempt, self.policy, self.buffer = config, attempt, policy, buffer
        self.metrics, self.lease = metrics, lease
        self.syncs = SyncWriter(
            config,
            attempt=attempt,
            ledger=ledger,
            versions=versions,
            checkpoints=checkpoints,
            lease=lease,
            scratch=scratch,
        )
        training = config.training
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
        )
        self.first_step = 1
        self.applied = -1  # newest sync whose record the buffer holds
        self.reading: dict[str, float] = {}  # seconds the reader has spent since the last batch
        self.stopping: Stopped | None = None

    # --- starting -------------------------------------------------------------------------------------------------

    def resume(self, state: TrainingState) -> None:
        """Go on from a checkpoint: the policy has been loaded from it, the records up to it are applied again."""
        restore_optimizer(self.optimizer, state.optimizer)
        torch.set_rng_state(state.random)
        for sync in range(state.sync + 1):
            self.buffer.sync(sync, step=self.config.step_of_sync(sync))
        self.buffer.restore(state.queues)
        self.applied, self.first_step = state.sync, state.step + 1

    def run(self) -> None:
        """Consumes recorded trajectories; produces records, ledger, versions and checkpoints. Waits for the initial
        fill, unblocked by any searcher's append, and never again."""
        self.syncs.publish(self.policy.snapshot(), max(self.applied, 0))
        if self.first_step > self.config.training.steps:
            return
        self.await_initial_fill()
        with ThreadPoolExecutor(1, "reader") as reader, self.syncs:
            try:
                self.take_steps(reader)
            finally:
                reader.shutdown(wait=False, cancel_futures=True)

    def await_initial_fill(self) -> None:
        """Until enough trajectories have arrived; a recorded start needs none."""
        wanted, began = self.config.search.initial_fill, time.monotonic()
        while not self.buffer.recorded(0):
            self.lease.check()
            arrived, waited = self.buffer.waiting(), time.monotonic() - began
            if arrived >= wanted:
                return
            if waited > self.config.limits.data_deadline:
                raise DeadlinePassed(
                    f"{arrived} of {wanted} trajectories (search.initial_fill) after {waited:.0f} s "
                    "(limits.data_deadline): are the searchers alive?"
                )
            self.lease.tell(f"waiting for the initial fill: {arrived} of {wanted}", arrived=arrived, wanted=wanted)
            time.sleep(1.0)  # each look lists the store

    # --- the loop -------------------------------------------------------------------------------------------------

    def take_steps(self, reader: ThreadPoolExecutor) -> None:
        """One batch ahead of the policy, never across a record that is not stored."""
        config, records = self.config, list[StepRecord]()
        admitted = reader.submit(self.admit, config.sync_before(self.first_step))
        upcoming = reader.submit(self.prepare, self.first_step, admitted)
        for step in range(self.first_step, config.training.steps + 1):
            self.hear()
            self.syncs.check()
            began, seconds = time.monotonic(), dict[str, float]()
            with timed(seconds, "wait"):
                prepared = upcoming.result()
            closes = step == config.step_of_sync(config.sync_of_step(step))
            if closes:
                admitted = reader.submit(self.admit, config.sync_of_step(step))
            if step < config.training.steps:
                upcoming = reader.submit(self.prepare, step + 1, admitted)
            with timed(seconds, "forward_backward"):
                learned = self.learn(step, prepared.batch)
            copy = self.copy(step, seconds) if closes else None
            seconds["step"] = time.monotonic() - began
            records.append(self.record(step, prepared, learned, seconds))
            if copy:
                self.syncs.write(copy, records, admitted)
                records = []
                if self.stopping:
                    break
        self.syncs.finish()
        if self.stopping:
            raise self.stopping

    def copy(self, step: int, seconds: dict[str, float]) -> Copy:
        """All that the sync after this step stores, as it is now."""
        sync = self.config.sync_of_step(step)
        last = sync == self.config.last_sync or self.stopping is not None
        return self.syncs.copy(self.policy, self.optimizer, sync=sync, step=step, last=last, seconds=seconds)

    def admit(self, sync: int) -> dict[str, Any]:
        """Runs in the reader thread: apply record `sync`; the prompt queues after it, before any later draw."""
        if sync > self.applied:
            with timed(self.reading, "sync"):
                self.buffer.sync(sync, step=self.config.step_of_sync(sync))
            self.applied = sync
        return self.buffer.queues()

    def prepare(self, step: int, admitted: Future[dict[str, Any]]) -> Prepared:
        """Runs in the reader thread, behind the record that this step may not cross: its batch."""
        admitted.result()
        seconds, self.reading = self.reading, {}
        with timed(seconds, "draw"):
            draws = self.buffer.draw(step)
        with timed(seconds, "fetch"):
            trajectories = self.buffer.fetch(draws)
        with timed(seconds, "collate"):
            batch = collate(
                trajectories,
                responses_per_prompt=self.config.training.responses_per_prompt,
                pad_id=self.policy.pad_id,
                include_eos=self.config.objective.include_eos,
                device=self.policy.device,
            )
        return Prepared(batch=batch, draws=draws, seconds=seconds)

    # --- learning -------------------------------------------------------------------------------------------------

    def learn(self, step: int, batch: Batch) -> Learned:
        """One optimizer update on the mean of the groups' losses."""
        training = self.config.training
        beta, rate = beta_at(step, self.config.objective), learning_rate_at(step, training)
        outcomes: list[Outcome] = []
        metrics: Metrics = {}
        self.optimizer.zero_grad(set_to_none=True)
        for share, loss, found in self.losses(batch, beta):
            (loss.value * share).backward()
            outcomes += found
            for name, value in {"loss": loss.value.detach(), **loss.metrics}.items():
                metrics[name] = metrics.get(name, 0.0) + float(value) * share
        gradients = [p.grad for p in self.policy.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        metrics |= {"grad_norm": float(norm), "lr": rate, "beta": beta}
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise RunFailed(
                f"step {step}: loss {metrics['loss']} with gradient norm {metrics['grad_norm']}; nothing was updated"
            )
        if training.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.policy.model.parameters(), training.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return Learned(outcomes=outcomes, metrics=metrics)

    def losses(self, batch: Batch, beta: float) -> Iterator[tuple[float, Loss, list[Outcome]]]:
        """Of each micro-batch: its share of the batch, its loss, and what was found for its rows."""
        k = self.config.training.responses_per_prompt
        for first_slot, micro in micro_batches(batch, self.config.training.groups_per_micro_batch):
            logp_B = response_logps(self.policy.model, micro, temperature=self.config.search.temperature)
            logp_PK, ref_PK = logp_B.view(-1, k), micro.ref_logp_B.view(-1, k)
            loss = trajectory_balance(logp_PK, ref_PK, micro.reward_B.view(-1, k), beta=beta)
            yield micro.groups / batch.groups, loss, _outcomes(first_slot, logp_PK.detach(), ref_PK, loss)

    # --- being told, and telling ----------------------------------------------------------------------------------

    def hear(self) -> None:
        """A request to stop is honoured at the next sync, with a checkpoint, so that nothing is taken again."""
        try:
            self.lease.check()
        except Stopped as stopped:
            self.stopping = self.stopping or stopped

    def record(self, step: int, prepared: Prepared, learned: Learned, seconds: Mapping[str, float]) -> StepRecord:
        """The step as the ledger keeps it; metrics and lease hear of it now."""
        config = self.config
        version = Version(config.sync_before(step), self.attempt)
        metrics = {
            **learned.metrics,
            **_batch_metrics(prepared),
            **{f"seconds_{part}": spent for part, spent in {**prepared.seconds, **seconds}.items()},
        }
        self.metrics.write(dict(metrics), step=step)
        state = "stopping at the next sync" if self.stopping else f"step {step} of {config.training.steps}"
        self.lease.tell(state, step=step, version=version.number, **metrics)
        return StepRecord(
            step=step,
            sync=config.sync_of_step(step),
            version=version,
            draws=prepared.draws,
            outcomes=learned.outcomes,
            metrics=metrics,
        )


def _check_objective(config: Config) -> None:
    """What this trainer would silently leave out."""
    objective = config.objective
    if objective.name != "trajectory-balance":
        raise ConfigError(f"objective.name: {objective.name!r} is not available yet")
    if objective.reference_reset:
        raise ConfigError(f"objective.reference_reset: not available yet, got {objective.reference_reset}")


def _outcomes(first_slot: int, logp_PK: Tensor, ref_PK: Tensor, loss: Loss) -> list[Outcome]:
    logp, ref = logp_PK.tolist(), ref_PK.tolist()
    residual, log_z = loss.residual_PK.tolist(), loss.log_z_P.tolist()
    return [
        Outcome(
            slot=first_slot + p,
            position=j,
            residual=residual[p][j],
            log_z=log_z[p],
            logp=logp[p][j],
            ref_logp=ref[p][j],
        )
        for p in range(len(logp))
        for j in range(len(logp[p]))
    ]


def _batch_metrics(prepared: Prepared) -> Metrics:
    draws, batch = prepared.draws, prepared.batch
    n = len(draws)
    return {
        "reward_mean": float(batch.reward_B.mean()),
        "age_mean": sum(d.age for d in draws) / n,
        "age_max": float(max(d.age for d in draws)),
        "recent_share": sum(d.branch == "recent" for d in draws) / n,
        "tokens": float(batch.response_mask_BT.sum()),
    }
