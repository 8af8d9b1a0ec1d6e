"""A learner takes gradient steps: it holds the policy and, if the objective needs one, a second model, and updates both
on batches. A learner is deterministic on a CPU and does not use storage, so that a step can be repeated."""
# Shapes: B rows, P prompts in the batch, K responses per prompt.

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tba.batches.batching import Batch, collate, groups_at, known
from tba.batches.packing import CannotPack, why_attention_pads, why_padded
from tba.batches.recomputation import keeping_little, layers_of
from tba.config import Config
from tba.distributed.ranks import ALONE, Ranks, Share, at_rest
from tba.fetched import Fetched
from tba.models.policy import AdapterSnapshot, Policy, Snapshot
from tba.models.pretrained import computing
from tba.objectives import Estimates, Groups, Loss
from tba.objectives.groups import ratio_moments
from tba.objectives.objective import Objective
from tba.runtime.parking import Owner, Parking
from tba.train.auxiliary_models import LogZ, ValueModel, make_auxiliary_model
from tba.train.micro_batches import (
    MicroBatch,
    Piece,
    Reader,
    Reading,
    groups_to_compute,
    metrics_of_batch,
    micro_batches,
    read,
    read_by_all,
    side_by_side,
)
from tba.train.moving_reference import MovingReference
from tba.train.optimizers import check_fits
from tba.train.schedules import beta_at, learning_rate_factor, reference_power_at
from tba.train.trained_model import Trained
from tba.train.training_state import TrainingState, optimizer_tensors, restore_optimizer
from tba.types import Metrics, Outcome


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The results of a step: an outcome for each drawn row, and metrics of the whole batch."""

    outcomes: Sequence[Outcome]
    metrics: Metrics
    skipped: str = ""  # why the step updated nothing; empty if it updated the weights


class Learner:
    def __init__(self, config: Config, policy: Policy, ranks: Ranks = ALONE):
        self.config, self.policy, self.ranks = config, policy, ranks
        self.objective = config.objective
        self.reference: MovingReference | None = None  # None until the reference moves: stored numbers suffice
        self.trained = Trained(policy.model, config.training, learning_rate=config.training.learning_rate)
        self.auxiliary = make_auxiliary_model(config, policy)
        if config.training.checkpoint_activations:
            layers_of(policy.model)  # refuses a model without such layers
        self.padded_because = why_padded(policy.model)
        with self._computing():
            self.attention_pads_because = "" if self.padded_because else why_attention_pads(policy.model)
        at_rest(policy.model)
        self.packs = not self.padded_because
        self.parking = Parking(lambda: _held_by(self))

    def restore(self, state: TrainingState) -> None:
        """Restore the optimizer, the random state, the reference and the second model from a checkpoint. The policy's
        weights must have been loaded from the checkpoint already."""
        check_fits(state.optimizer_name, self.config.training.optimizer)
        restore_optimizer(self.trained.optimizer, state.optimizer)
        torch.set_rng_state(state.random)
        if state.reference is not None:
            self.reference = MovingReference(self.policy.twin())
            self.reference.restore(state.reference)
        if self.auxiliary and state.auxiliary:
            self.auxiliary.restore(state.auxiliary)

    def state(self, *, step: int, sync: int) -> TrainingState:
        """Return what a checkpoint after this step keeps besides the policy's weights and the prompt queues."""
        return TrainingState(
            step=step,
            sync=sync,
            queues={},
            optimizer=optimizer_tensors(self.trained.optimizer) if self.ranks.stores else {},
            optimizer_name=self.config.training.optimizer,
            random=torch.get_rng_state(),
            reference=self.reference and self.reference.tensors(keep=self.ranks.rank == 0),
            auxiliary=self.auxiliary and self.auxiliary.tensors(self.ranks),
            ranks=self.ranks,
        )

    def snapshot(self) -> Snapshot | AdapterSnapshot:
        return self.policy.snapshot()

    def collate(self, fetched: Fetched) -> Batch:
        return collate(
            fetched,
            responses_per_prompt=self.config.training.responses_per_prompt,
            pad_id=self.policy.pad_id,
            include_eos=self.objective.include_eos,
            by_token=self.objective.needs_tokens or self.config.training.rate_by_effective_share,
            by_step=self.objective.needs_values,
            needs_reference=self.objective.needs_reference,
            device=self.policy.device,
        )

    def learn(self, step: int, batch: Batch) -> Learned:
        """Take one gradient step of the policy, and of the second model if there is one, on the mean of the groups'
        losses. Update no weight if the loss or a gradient norm is not finite."""
        training = self.config.training
        beta, factor = beta_at(step, self.objective), learning_rate_factor(step, training)
        batch = replace(batch, reference_power=reference_power_at(step, self.objective))
        self.reset_reference(step)
        outcomes, metrics = self.differentiate(batch, beta)
        norms = [it.grad_norm() for it in self.all_trained()]
        metrics |= {it.norm_name: float(norm) for it, norm in zip(self.all_trained(), norms, strict=True)}
        factor *= math.sqrt(metrics.get("effective_share", 1.0))
        metrics |= {"lr": training.learning_rate * factor, "beta": beta}
        if self.objective.tempers:
            metrics["reference_power"] = batch.reference_power
        if not all(map(math.isfinite, (metrics["loss"], *map(float, norms)))):
            found = " and ".join(str(float(norm)) for norm in norms)
            why = f"step {step}: loss {metrics['loss']} with gradient norm {found}; no weight was updated"
            return Learned(
                outcomes=[_known(it) for it in outcomes], metrics={**known(metrics), "skipped": 1.0}, skipped=why
            )
        for it, norm in zip(self.all_trained(), norms, strict=True):
            metrics |= it.update(norm, factor=factor)
        if self.reference and (decay := self.objective.reference_decay):
            self.reference.follow(self.policy.model, decay=decay)
        return Learned(outcomes=outcomes, metrics=metrics)

    def differentiate(self, batch: Batch, beta: float) -> tuple[list[Outcome], Metrics]:
        """Compute the gradients of the batch's mean loss. Return the outcomes of the rows in this rank's share, and the
        metrics of the whole batch."""
        try:
            return self._accumulate(batch, beta)
        except CannotPack:
            self.packs = False
            return self._accumulate(batch, beta)

    def _accumulate(self, batch: Batch, beta: float) -> tuple[list[Outcome], Metrics]:
        computed = groups_to_compute(batch, self.objective, training := self.config.training)
        chosen = batch if len(computed) == batch.groups else groups_at(batch, computed)
        share = self.ranks.share(chosen)
        slots = [computed[it] for it in share.slots]
        cut = micro_batches(
            share.batch,
            most_groups=training.most_groups,
            most_tokens=training.tokens_per_micro_batch,
            packs=self.packs,
            equal_once=training.computed_rows == "needed",
        )
        parts, counted = side_by_side(cut, share, self.ranks)
        if self.reference:
            parts = [self.reference.refer(part, self.logps) for part in parts]
        readers = self._readers()
        known, estimates = self._look_ahead(parts, share, chosen, whole=batch, beta=beta)
        outcomes: list[Outcome] = []
        metrics: Metrics = {}
        for it in self.all_trained():
            it.optimizer.zero_grad(set_to_none=True)
        for n, (part, at_hand) in enumerate(zip(parts, known, strict=True)):
            reading = Reading(readers, part, at_hand)
            groups = self._groups(part.batch, part.spread_all(reading.found), whole=batch)
            if estimates:
                groups = estimates.of(part.first_slot, groups)
            loss = self.objective.loss(groups, beta=beta)
            counts = part.batch.groups if n < counted else 0
            reading.backward(loss.value * (counts / batch.groups))
            outcomes += _outcomes(slots[part.first_slot :], groups, loss) if counts else []
            metrics["loss"] = metrics.get("loss", 0.0) + float(loss.value.detach()) * (counts / batch.groups)
            moments = ratio_moments(groups) if training.rate_by_effective_share else {}
            for name, value in {**loss.metrics, **moments}.items():
                metrics[name] = metrics.get(name, 0.0) + float(value) * (counts / len(computed))
        for it in self.all_trained():
            it.add_up(self.ranks)
        of_batch = estimates.metrics if estimates else {}
        metrics = self.ranks.total(metrics) | {name: float(value) for name, value in of_batch.items()}
        if training.rate_by_effective_share:
            metrics["effective_share"] = metrics.pop("ratio_first") ** 2 / metrics.pop("ratio_second")
        if len(computed) < batch.groups:
            metrics |= metrics_of_batch(batch, computed)
            if self.ranks.rank == 0:
                outcomes += _outcomes_without_gradient(batch, computed, self.objective, self.reference is not None)
        return sorted(outcomes, key=lambda it: (it.slot, it.position)), metrics

    def _look_ahead(
        self, parts: Sequence[MicroBatch], share: Share, chosen: Batch, *, whole: Batch, beta: float
    ) -> tuple[Sequence[Mapping[str, Tensor] | None], Estimates | None]:
        """Read all groups that are computed, `chosen`, once without gradients, if the objective needs estimates from
        the whole batch. Return the numbers that were read of each part, and the estimates of this rank's share."""
        if not self.objective.needs_whole_batch:
            return [None] * len(parts), None
        known = [read(self._readers(), part) for part in parts]
        chosen, found_BT = read_by_all(parts, known, share, chosen, self.ranks)
        estimates = self.objective.estimates(self._groups(chosen, found_BT, whole=whole), beta=beta)
        return known, estimates.at(share.slots)

    def _groups(self, part: Batch, found_BT: Mapping[str, Tensor], *, whole: Batch) -> Groups:
        """Return a part of the batch as groups. `found_BT` has the numbers of each reader."""
        groups = as_groups(found_BT["logp"], part, whole=whole, max_tokens=self.config.search.max_response_tokens)
        if "value" in found_BT:
            return replace(groups, value_PKT=found_BT["value"].unflatten(0, (-1, part.responses_per_prompt)))
        if self.auxiliary and isinstance(self.auxiliary.model, LogZ):
            most = self.config.training.tokens_per_micro_batch
            with self._computing():
                return replace(groups, log_z_P=self.auxiliary.model(self.policy.model, part, most, self.ranks))
        return groups

    def _readers(self) -> dict[str, Reader]:
        """Return the functions that compute the numbers of each counted token, by name: its log-probability, and its
        value if a value model is trained."""
        readers: dict[str, Reader] = {"logp": partial(self.logps, self.policy.model)}
        if self.auxiliary and isinstance(self.auxiliary.model, ValueModel):
            readers["value"] = partial(self._values, self.auxiliary.model)
        return readers

    def logps(self, model: nn.Module, piece: Piece) -> Tensor:
        with self._computing(), self._keeping(model):
            return piece.logps(model, temperature=self.config.search.temperature)

    def _values(self, model: ValueModel, piece: Piece) -> Tensor:
        with self._computing(), self._keeping(model):
            return model(piece)

    def _computing(self) -> torch.autocast:
        return computing(self.policy.model, self.config.training.compute_dtype)

    def _keeping(self, model: nn.Module) -> AbstractContextManager[None]:
        return keeping_little(model) if self.config.training.checkpoint_activations else nullcontext()

    def all_trained(self) -> list[Trained[Any]]:
        return [self.trained, *([self.auxiliary] if self.auxiliary else [])]

    def reset_reference(self, step: int) -> None:
        """Set the reference to the current policy if a reset is due before this step. A reference that follows the
        policy as a moving average begins as a copy of the policy before the first step. With
        `objective.reset_optimizer`, a reset also empties the state of the optimizers."""
        objective = self.objective
        follows = objective.reference_decay > 0
        due = objective.reference_reset > 0 and step > 1 and (step - 1) % objective.reference_reset == 0
        if self.reference is None and (follows or due):
            self.reference = MovingReference(self.policy.twin())
        elif self.reference and due:
            self.reference.follow(self.policy.model, decay=0)
        if due and objective.reset_optimizer:
            for it in self.all_trained():
                it.optimizer.state.clear()


def _held_by(learner: Learner) -> list[Owner]:
    """Return the models and optimizers of a learner."""
    reference = [learner.reference.model] if learner.reference else []
    return [*reference, *(owner for it in learner.all_trained() for owner in (it.model, it.optimizer))]


def _known(outcome: Outcome) -> Outcome:
    """Return an outcome with None in place of numbers that are not finite."""
    numbers = {name: getattr(outcome, name) for name in ("advantage", "residual", "log_z", "logp", "ref_logp")}
    return replace(outcome, **{name: None for name, it in numbers.items() if it is not None and not math.isfinite(it)})


def as_groups(logp_BT: Tensor, part: Batch, *, whole: Batch, max_tokens: int | None = None) -> Groups:
    """Return rows and their log-probabilities under the policy as groups of K, with the statistics of the whole batch
    that objectives need."""

    def grouped(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, part.responses_per_prompt))

    return Groups(
        logp_PKT=grouped(logp_BT),
        mask_PKT=grouped(part.response_mask_BT),
        reward_PK=grouped(part.reward_B),
        ref_logp_PK=None if part.ref_logp_B is None else grouped(part.ref_logp_B),
        ref_logp_PKT=None if part.ref_logp_BT is None else grouped(part.ref_logp_BT),
        behaviour_logp_PKT=None if part.behaviour_logp_BT is None else grouped(part.behaviour_logp_BT),
        step_value_PKT=None if part.step_value_BT is None else grouped(part.step_value_BT),
        step_next_PKT=None if part.step_next_BT is None else grouped(part.step_next_BT),
        length_PK=grouped(torch.tensor(part.lengths, device=logp_BT.device)),
        batch_reward=float(whole.reward_B.mean()),
        batch_spread=float(spread_of(whole)),
        batch_tokens=float(whole.response_mask_BT.sum()) / len(whole.lengths),
        max_tokens=max_tokens,
        reference_power=part.reference_power,
    )


def spread_of(batch: Batch) -> Tensor:
    """Return the standard deviation of all rewards of a batch after the mean of their group is subtracted."""
    reward_PK = batch.reward_B.unflatten(0, (-1, batch.responses_per_prompt))
    return (reward_PK - reward_PK.mean(dim=1, keepdim=True)).square().mean().sqrt()


def _outcomes(slots: Sequence[int], groups: Groups, loss: Loss) -> list[Outcome]:
    """Return the outcomes of the rows of some groups, which are in these slots of the batch."""
    logp, advantage = groups.logp_PK.tolist(), loss.advantage_PK.tolist()
    ref = groups.ref_logp_PK.tolist() if groups.ref_logp_PK is not None else [[None] * len(row) for row in logp]
    residual = loss.residual_PK.tolist() if loss.residual_PK is not None else [[None] * len(row) for row in logp]
    log_z = loss.log_z_P.tolist() if loss.log_z_P is not None else [None] * len(logp)
    return [
        Outcome(
            slot=slots[p],
            position=j,
            advantage=advantage[p][j],
            residual=residual[p][j],
            log_z=log_z[p],
            logp=logp[p][j],
            ref_logp=ref[p][j],
        )
        for p in range(len(logp))
        for j in range(len(logp[p]))
    ]


def _outcomes_without_gradient(
    batch: Batch, computed: Sequence[int], objective: Objective, reference_moved: bool
) -> list[Outcome]:
    """Return the outcomes of the rows of all other groups. Advantages and residuals are 0, and `logp` is None.
    `ref_logp` is None if none is stored, or if the reference has moved away from it."""
    k, residual = batch.responses_per_prompt, 0.0 if objective.has_residuals else None
    ref_logps = None if batch.ref_logp_B is None or reference_moved else batch.ref_logp_B.tolist()
    return [
        Outcome(
            slot=group, position=j, advantage=0.0, residual=residual, log_z=None, logp=None,
            ref_logp=None if ref_logps is None else ref_logps[group * k + j],
        )
        for group in sorted(set(range(batch.groups)) - set(computed))
        for j in range(k)
    ]  # fmt: skip
