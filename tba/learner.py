"""A learner steps: policy and optimizer, and what a batch does to them. Deterministic on a CPU and blind to storage, so
that a step can be taken again."""
# Shapes: B rows, P prompts in the batch, K responses per prompt.

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tba.batching import Batch, collate, micro_batches
from tba.config import Config
from tba.errors import RunFailed
from tba.fetched import Fetched
from tba.logprobs import token_logps
from tba.objectives import Groups, Loss, make_objective
from tba.policy import Policy
from tba.reference import MovingReference
from tba.schedules import beta_at, learning_rate_at
from tba.training_state import TrainingState, optimizer_tensors, restore_optimizer
from tba.types import Metrics, Outcome


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a step found: for each drawn row, and in all."""

    outcomes: Sequence[Outcome]
    metrics: Metrics


class Learner:
    def __init__(self, config: Config, policy: Policy):
        self.config, self.policy = config, policy
        self.objective = make_objective(config.objective, max_tokens=config.search.max_response_tokens)
        self.reference: MovingReference | None = None  # until it moves, what is stored of it serves
        training = config.training
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
        )

    def restore(self, state: TrainingState) -> None:
        """Go on from a checkpoint, from which the policy has been loaded."""
        restore_optimizer(self.optimizer, state.optimizer)
        torch.set_rng_state(state.random)
        if state.reference is not None:
            self.reference = MovingReference(self.policy.model)
            self.reference.restore(state.reference)

    def state(self, *, step: int, sync: int) -> TrainingState:
        """All that a checkpoint after this step keeps beside the policy, but for the prompt queues."""
        return TrainingState(
            step=step,
            sync=sync,
            queues={},
            optimizer=optimizer_tensors(self.optimizer),
            random=torch.get_rng_state(),
            reference=self.reference and self.reference.tensors(),
        )

    def collate(self, fetched: Fetched) -> Batch:
        return collate(
            fetched,
            responses_per_prompt=self.config.training.responses_per_prompt,
            pad_id=self.policy.pad_id,
            include_eos=self.config.objective.include_eos,
            by_token=self.config.objective.needs_tokens,
            device=self.policy.device,
        )

    def learn(self, step: int, batch: Batch) -> Learned:
        """One optimizer update on the mean of the groups' losses."""
        training = self.config.training
        beta, rate = beta_at(step, self.config.objective), learning_rate_at(step, training)
        self._reset_reference(step)
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
        if self.reference and (decay := self.config.objective.reference_decay):
            self.reference.follow(self.policy.model, decay=decay)
        return Learned(outcomes=outcomes, metrics=metrics)

    def losses(self, batch: Batch, beta: float) -> Iterator[tuple[float, Loss, list[Outcome]]]:
        """Of each micro-batch: its share of the batch, its loss, and what was found for its rows."""
        for first_slot, part in micro_batches(batch, self.config.training.groups_per_micro_batch):
            micro = self._referred(part)
            groups = as_groups(self._token_logps(self.policy.model, micro), micro, whole=batch)
            loss = self.objective(groups, beta=beta)
            yield micro.groups / batch.groups, loss, _outcomes(first_slot, groups, loss)

    def _reset_reference(self, step: int) -> None:
        """Before a step: the reference becomes the policy as it is. One that follows begins so, too."""
        objective = self.config.objective
        follows = objective.reference_decay > 0
        due = objective.reference_reset > 0 and step > 1 and (step - 1) % objective.reference_reset == 0
        if self.reference is None and (follows or due):
            self.reference = MovingReference(self.policy.model)
        elif self.reference and due:
            self.reference.follow(self.policy.model, decay=0)
        if due and objective.reset_optimizer:
            self.optimizer.state.clear()

    def _referred(self, batch: Batch) -> Batch:
        """With log-probabilities under the reference as it is now."""
        if self.reference is None:
            return batch
        with torch.no_grad():
            ref_logp_BT = self._token_logps(self.reference.model, batch)
        by_token = None if batch.ref_logp_BT is None else ref_logp_BT
        return replace(batch, ref_logp_B=ref_logp_BT.sum(dim=1), ref_logp_BT=by_token)

    def _token_logps(self, model: nn.Module, batch: Batch) -> Tensor:
        temperature = self.config.search.temperature
        return token_logps(model, batch.tokens_BT, batch.response_mask_BT, temperature=temperature)


def as_groups(logp_BT: Tensor, part: Batch, *, whole: Batch) -> Groups:
    """Rows under the policy as groups of K, with what an objective asks of the batch that they are a part of."""

    def grouped(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, part.responses_per_prompt))

    return Groups(
        logp_PKT=grouped(logp_BT),
        mask_PKT=grouped(part.response_mask_BT),
        reward_PK=grouped(part.reward_B),
        ref_logp_PK=grouped(part.ref_logp_B),
        ref_logp_PKT=None if part.ref_logp_BT is None else grouped(part.ref_logp_BT),
        behaviour_logp_PKT=None if part.behaviour_logp_BT is None else grouped(part.behaviour_logp_BT),
        length_PK=grouped(torch.tensor(part.lengths, device=logp_BT.device)),
        batch_reward=float(whole.reward_B.mean()),
        batch_tokens=float(whole.response_mask_BT.sum()) / len(whole.lengths),
    )


def _outcomes(first_slot: int, groups: Groups, loss: Loss) -> list[Outcome]:
    logp, ref, advantage = (it.tolist() for it in (groups.logp_PK.detach(), groups.ref_logp_PK, loss.advantage_PK))
    residual = loss.residual_PK.tolist() if loss.residual_PK is not None else [[None] * len(row) for row in logp]
    log_z = loss.log_z_P.tolist() if loss.log_z_P is not None else [None] * len(logp)
    return [
        Outcome(
            slot=first_slot + p,
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
