"""Choose the groups of a batch that a step computes, and make the outcomes of its rows: those of the ledger.

Some groups have no gradient whatever the policy is, for example groups with equal rewards under an objective without a
KL penalty. A step need not compute them.
"""
# Shapes: B rows, P prompts in the batch, K responses per prompt.

from collections.abc import Sequence

import torch
from torch import Tensor

from tba.batches.batching import Batch, first_equal_rows, groups_at
from tba.config import TrainingConfig
from tba.distributed.ranks import Ranks, Share
from tba.objectives import Groups, Loss
from tba.objectives.groups import equal_rewards
from tba.objectives.objective import Objective
from tba.types import Metrics, Outcome


def groups_to_compute(batch: Batch, objective: Objective, training: TrainingConfig) -> Sequence[int]:
    """Return all groups of a batch or, with `training.computed_rows` at `needed`, those whose gradient may be different
    from 0. At least one group is returned, so that all gradients exist: a step whose gradients are 0 still has momentum
    and weight decay."""
    if training.computed_rows == "all":
        return range(batch.groups)
    first_PK = torch.tensor(first_equal_rows(batch)).unflatten(0, (-1, batch.responses_per_prompt))
    without_P = objective.has_no_gradient(_rewards(batch), (first_PK == first_PK[:, :1]).all(dim=1))
    return [group for group, without in enumerate(without_P.tolist()) if not without] or [0]


def share_of(batch: Batch, computed: Sequence[int], ranks: Ranks) -> Share:
    """Return the share of a rank in the groups that are computed, with their slots in the whole batch."""
    if len(computed) == batch.groups:
        return ranks.share(batch)
    share = ranks.share(groups_at(batch, computed))
    return share._replace(slots=[computed[it] for it in share.slots])


def outcomes_without_gradient(
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


def metrics_of_batch(batch: Batch, computed: Sequence[int]) -> Metrics:
    """Return the metric `equal_rewards` of the whole batch, and `computed_tokens`: the number of counted tokens in the
    groups that are computed."""
    tokens_P = batch.response_mask_BT.sum(dim=1).unflatten(0, (-1, batch.responses_per_prompt)).sum(dim=1)
    tokens = sum(tokens_P[group] for group in computed)
    return {"equal_rewards": float(equal_rewards(_rewards(batch))), "computed_tokens": float(tokens)}


def _rewards(batch: Batch) -> Tensor:
    return batch.reward_B.cpu().unflatten(0, (-1, batch.responses_per_prompt))


def outcomes_of(slots: Sequence[int], groups: Groups, loss: Loss) -> list[Outcome]:
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
