"""A trainer learns: it draws batches from the replay buffer, steps on the loss, and syncs every k steps.

Three threads with one job each, and nothing shared between them but finished values:

    reader   record of sync n (once step n x k has begun) -> draw -> fetch -> collate, one batch ahead
    main     forward, backward, step
    writer   ledger of sync n -> version n -> checkpoint n -> pruning, from a snapshot

Order at a sync: record, ledger, checkpoint. A crash between any two of them is made good by the next attempt, which
takes the steps since the newest checkpoint again, on the same records.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tba.batching import Batch, collate, micro_batches
from tba.config import Config
from tba.errors import DeadlinePassed, RunFailed, Stopped
from tba.interfaces import CheckpointStore, EventLog, Lease, Ledger, MetricLog, ReplayBuffer, VersionStore
from tba.logprobs import response_logps
from tba.objectives import trajectory_balance
from tba.policy import Policy, Snapshot
from tba.schedules import beta_at, learning_rate_at
from tba.timing import timed
from tba.training_state import TrainingState, optimizer_tensors, restore_optimizer
from tba.types import Draw, Metrics, Outcome, StepRecord, Version


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the reader thread hands over: a batch, how it came about, and the queues as of the sync before it."""

    batch: Batch | None  # None after the last step
    draws: Sequence[Draw]
    queues: dict[str, Any]
    seconds: dict[str, float]


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
        events: EventLog,
        scratch: Path,
    ):
        self.config, self.attempt, self.policy, self.scratch = config, attempt, policy, scratch
        self.buffer, self.ledger, self.versions, self.checkpoints = buffer, ledger, versions, checkpoints
        self.metrics, self.lease, self.events = metrics, lease, events
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
        self.queues: dict[str, Any] = {}
        self.stopping: Stopped | None = None

    # --- starting -------------------------------------------------------------------------------------------------

    def resume(self, state: TrainingState) -> None:
        """Go on from a checkpoint: the policy has been loaded from it, the records up to it are applied again."""
        restore_optimizer(self.optimizer, state.optimizer)
        torch.set_rng_state(state.random)
        for sync in range(state.sync + 1):
            self.buffer.sync(sync, step=self.config.step_of_sync(sync))
        self.buffer.restore(state.queues)
        self.applied, self.queues, self.first_step = state.sync, state.queues, state.step + 1

    def run(self) -> None:
        """Consumes recorded trajectories; produces records, ledger, versions and checkpoints. Waits for the initial
        fill, unblocked by any searcher's append, and never again."""
        self.publish(self.policy.snapshot(), max(self.applied, 0))
        if self.first_step > self.config.training.steps:
            return
        self.await_initial_fill()
        with ThreadPoolExecutor(1, "reader") as reader, ThreadPoolExecutor(1, "writer") as writer:
            try:
                self.take_steps(reader, writer)
            finally:
                reader.shutdown(cancel_futures=True)

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
            time.sleep(0.2)

    # --- the loop -------------------------------------------------------------------------------------------------

    def take_steps(self, reader: ThreadPoolExecutor, writer: ThreadPoolExecutor) -> None:
        upcoming = reader.submit(self.prepare, self.first_step)
        written: Future[None] | None = None
        records: list[StepRecord] = []
        for step in range(self.first_step, self.config.training.steps + 1):
            self.hear()
            began = time.monotonic()
            prepared = upcoming.result()
            waited = time.monotonic() - began
            upcoming = reader.submit(self.prepare, step + 1)
            record = self.learn(step, prepared, began=began, waited=waited)
            records.append(record)
            self.metrics.write(dict(record.metrics), step=step)
            self.tell(record)
            if step == self.config.step_of_sync(record.sync):
                if written is not None and written.done():
                    written.result()  # an error of the writer ends the run here
                written = self.close_sync(record.sync, records, upcoming, written, writer)
                records = []
                if self.stopping:
                    break
        if written is not None:
            written.result()
        if self.stopping:
            raise self.stopping

    def prepare(self, step: int) -> Prepared:
        """Runs in the reader thread: the record that this step may not cross, then its batch."""
        sync = self.sync_before(step)
        seconds: dict[str, float] = {}
        if sync > self.applied:
            with timed(seconds, "sync"):
                self.buffer.sync(sync, step=self.config.step_of_sync(sync))
            self.applied, self.queues = sync, self.buffer.queues()
        if step > self.config.training.steps:
            return Prepared(batch=None, draws=(), queues=self.queues, seconds=seconds)
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
        return Prepared(batch=batch, draws=draws, queues=self.queues, seconds=seconds)

    def sync_before(self, step: int) -> int:
        """The sync whose record a step may not cross; after the last step, the last sync."""
        if step > self.config.training.steps:
            return self.config.last_sync
        return (step - 1) // self.config.sync.every

    def learn(self, step: int, prepared: Prepared, *, began: float, waited: float) -> StepRecord:
        """One optimizer update on the mean of the groups' losses."""
        batch, training, objective = prepared.batch, self.config.training, self.config.objective
        assert batch is not None
        beta, rate = beta_at(step, objective), learning_rate_at(step, training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        forward_began = time.monotonic()
        self.optimizer.zero_grad(set_to_none=True)
        loss, outcomes, k = 0.0, [], training.responses_per_prompt
        for first_slot, micro in micro_batches(batch, training.groups_per_micro_batch):
            logp_B = response_logps(self.policy.model, micro, temperature=self.config.search.temperature)
            logp_PK, ref_PK = logp_B.view(-1, k), micro.ref_logp_B.view(-1, k)
            result = trajectory_balance(logp_PK, ref_PK, micro.reward_B.view(-1, k), beta=beta)
            share = logp_PK.shape[0] / training.prompts_per_step
            (result.value * share).backward()
            loss += float(result.value.detach()) * share
            outcomes += _outcomes(first_slot, logp_PK.detach(), ref_PK, result.residual_PK, result.log_z_P)
        grad_norm = float(
            torch.nn.utils.get_total_norm([p.grad for p in self.policy.model.parameters() if p.grad is not None])
        )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunFailed(f"step {step}: loss {loss} with gradient norm {grad_norm}; nothing was updated")
        if training.clip_norm and grad_norm > training.clip_norm:
            for parameter in self.policy.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(training.clip_norm / grad_norm)
        self.optimizer.step()
        ended = time.monotonic()
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": rate,
            "beta": beta,
            **_batch_metrics(prepared.draws, outcomes, batch),
            **{f"seconds_{part}": seconds for part, seconds in prepared.seconds.items()},
            "seconds_wait": waited,
            "seconds_forward_backward": ended - forward_began,
            "seconds_step": ended - began,
        }
        return StepRecord(
            step=step,
            sync=math.ceil(step / self.config.sync.every),
            version=Version(self.sync_before(step), self.attempt),
            draws=prepared.draws,
            outcomes=outcomes,
            metrics=metrics,
        )

    # --- syncing --------------------------------------------------------------------------------------------------

    def close_sync(
        self,
        sync: int,
        records: list[StepRecord],
        upcoming: Future[Prepared],
        written: Future[None] | None,
        writer: ThreadPoolExecutor,
    ) -> Future[None]:
        """Hand a sync to the writer. Where the store is slower than k steps, versions are skipped, the ledger never."""
        last = sync == self.config.last_sync or self.stopping is not None
        checkpoint = last or sync % self.config.sync.checkpoint_every == 0
        publish = checkpoint or written is None or written.done()
        snapshot = self.policy.snapshot()
        moments = optimizer_tensors(self.optimizer) if checkpoint else {}
        random = torch.get_rng_state()

        def write() -> None:
            prepared = upcoming.result()  # record `sync` is stored before the ledger that follows it
            self.ledger.write(sync, records, weights_sha256=snapshot.sha256())
            if publish:
                self.publish(snapshot, sync)
            if checkpoint:
                state = TrainingState(
                    step=records[-1].step, sync=sync, queues=prepared.queues, optimizer=moments, random=random
                )
                self.checkpoint(snapshot, state)
                self.checkpoints.prune(self.config.sync.keep_checkpoints)
            self.versions.prune(keep=self.config.sync.keep_versions, every=self.config.evaluation.every)

        return writer.submit(write)

    def publish(self, snapshot: Snapshot, sync: int) -> None:
        with TemporaryDirectory(dir=self.scratch) as name:
            snapshot.save(Path(name), dtype=self.config.model.publish_dtype)
            self.versions.publish(Version(sync, self.attempt), step=self.config.step_of_sync(sync), folder=Path(name))

    def checkpoint(self, snapshot: Snapshot, state: TrainingState) -> None:
        with TemporaryDirectory(dir=self.scratch) as name:
            snapshot.save(Path(name), dtype=self.config.model.dtype)
            state.save(Path(name))
            self.checkpoints.save(state.sync, self.attempt, step=state.step, folder=Path(name))

    # --- being told, and telling ----------------------------------------------------------------------------------

    def hear(self) -> None:
        """A request to stop is honoured at the next sync, with a checkpoint, so that nothing is taken again."""
        try:
            self.lease.check()
        except Stopped as stopped:
            self.stopping = self.stopping or stopped

    def tell(self, record: StepRecord) -> None:
        state = "stopping at the next sync" if self.stopping else f"step {record.step} of {self.config.training.steps}"
        self.lease.tell(state, step=record.step, version=record.version.number, **record.metrics)


def _outcomes(
    first_slot: int, logp_PK: torch.Tensor, ref_PK: torch.Tensor, residual_PK: torch.Tensor, log_z_P: torch.Tensor
) -> list[Outcome]:
    logp, ref, residual, log_z = logp_PK.tolist(), ref_PK.tolist(), residual_PK.tolist(), log_z_P.tolist()
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


def _batch_metrics(draws: Sequence[Draw], outcomes: Sequence[Outcome], batch: Batch) -> Metrics:
    n = len(draws)
    return {
        "log_z": sum(o.log_z for o in outcomes) / n,
        "residual_abs": sum(abs(o.residual) for o in outcomes) / n,
        "log_ratio_mean": sum(o.logp - o.ref_logp for o in outcomes) / n,
        "reward_mean": float(batch.reward_B.mean()),
        "age_mean": sum(d.age for d in draws) / n,
        "age_max": float(max(d.age for d in draws)),
        "recent_share": sum(d.branch == "recent" for d in draws) / n,
        "tokens": float(batch.response_mask_BT.sum()),
    }
