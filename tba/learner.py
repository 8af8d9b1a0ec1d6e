"""A learner steps: policy and optimizer, and what a batch does to them. Deterministic on a CPU and blind to storage, so
that a step can be taken again."""
# Shapes: B rows, P prompts in the batch, K responses per prompt.

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tba.batching import Batch, collate, micro_batches
from tba.config import Config
from tba.errors import ConfigError, RunFailed
from tba.fetched import Fetched
from tba.logprobs import response_logps
from tba.objectives import Loss, trajectory_balance
from tba.policy import Policy
from tba.schedules import beta_at, learning_rate_at
from tba.training_state import TrainingState, restore_optimizer
from tba.types import Metrics, Outcome


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a step found: for each drawn row, and in all."""

    outcomes: Sequence[Outcome]
    metrics: Metrics


class Learner:
    def __init__(self, config: Config, policy: Policy):
        _check_objective(config)
        self.config, self.policy = config, policy
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

    def collate(self, fetched: Fetched) -> Batch:
        return collate(
            fetched,
            responses_per_prompt=self.config.training.responses_per_prompt,
            pad_id=self.policy.pad_id,
            include_eos=self.config.objective.include_eos,
            device=self.policy.device,
        )

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


def _check_objective(config: Config) -> None:
    """What this learner would silently leave out."""
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
