"""Trajectories to padded tensors: the one place where shapes are born.

A batch is groups of K rows, one prompt each, in the order of the draw; a group is never split, because its residuals
are taken from its own mean. Rows are padded on the right.
"""
# Shapes: B = P x K rows, P prompts (groups), K responses per prompt, T tokens of prompt and response with padding.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.errors import ConfigError, DataError
from tba.types import Draw, Metrics, Trajectory


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a gradient step, or a part of one, is computed from."""

    tokens_BT: Tensor  # int64: prompt, response, padding
    response_mask_BT: Tensor  # bool: the tokens that count; no EOS here where the objective leaves it out
    ref_logp_B: Tensor  # float32: of the whole response under the reference, the same tokens counted
    reward_B: Tensor  # float32
    responses_per_prompt: int  # K
    lengths: tuple[int, ...]  # B: tokens of each row without padding

    @property
    def groups(self) -> int:
        return len(self.lengths) // self.responses_per_prompt


def batch_metrics(draws: Sequence[Draw], batch: Batch) -> Metrics:
    """What a batch is, whatever is learned from it."""
    n = len(draws)
    return {
        "reward_mean": float(batch.reward_B.mean()),
        "age_mean": sum(d.age for d in draws) / n,
        "age_max": float(max(d.age for d in draws)),
        "recent_share": sum(d.branch == "recent" for d in draws) / n,
        "tokens": float(batch.response_mask_BT.sum()),
    }


class Padded(NamedTuple):
    tokens_BT: Tensor
    response_mask_BT: Tensor
    lengths: tuple[int, ...]


def collate(
    trajectories: Sequence[Trajectory],
    *,
    responses_per_prompt: int,
    pad_id: int,
    include_eos: bool,
    device: torch.device | str = "cpu",
) -> Batch:
    """Consecutive runs of K trajectories as groups, in the given order.

    A finished response ends with EOS, which counts if `include_eos`; a truncated one counts whole either way.
    """
    _check_groups(trajectories, responses_per_prompt)
    counted = [_counted(trajectory, include_eos) for trajectory in trajectories]
    tokens_BT, response_mask_BT, lengths = pad(
        [t.prompt_tokens for t in trajectories],
        [t.response_tokens[:n] for t, n in zip(trajectories, counted, strict=True)],
        pad_id=pad_id,
        device=device,
    )
    row_N = np.repeat(np.arange(len(counted)), counted)
    ref_logps = (t.ref_logps[:n] for t, n in zip(trajectories, counted, strict=True))
    ref_logp_N = np.fromiter(chain.from_iterable(ref_logps), np.float64, count=len(row_N))
    ref_logp_B = np.bincount(row_N, weights=ref_logp_N, minlength=len(counted))
    return Batch(
        tokens_BT=tokens_BT,
        response_mask_BT=response_mask_BT,
        ref_logp_B=torch.from_numpy(ref_logp_B).float().to(device),
        reward_B=torch.tensor([t.reward for t in trajectories], dtype=torch.float32, device=device),
        responses_per_prompt=responses_per_prompt,
        lengths=lengths,
    )


def pad(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device | str = "cpu",
) -> Padded:
    """Rows of prompt and response, padded on the right to the longest; the mask is true on the response."""
    start_B = np.array([len(prompt) for prompt in prompts])
    end_B = start_B + np.array([len(response) for response in responses])
    if not start_B.all():
        raise DataError(f"row {int(start_B.argmin())}: a prompt needs at least 1 token, got 0")
    parts = chain.from_iterable(zip(prompts, responses, strict=True))
    column_T = np.arange(end_B.max())
    tokens_BT = np.full((len(end_B), len(column_T)), pad_id, np.int64)
    tokens_BT[column_T < end_B[:, None]] = np.fromiter(chain.from_iterable(parts), np.int64, count=end_B.sum())
    response_mask_BT = (column_T >= start_B[:, None]) & (column_T < end_B[:, None])
    return Padded(
        torch.from_numpy(tokens_BT).to(device), torch.from_numpy(response_mask_BT).to(device), tuple(end_B.tolist())
    )


def micro_batches(batch: Batch, groups_per_micro_batch: int) -> Iterator[tuple[int, Batch]]:
    """The batch in parts of whole groups, each with the number of its first group and padded no wider than it needs.

    The mean over all groups is the parts' means, each weighted by `part.groups / batch.groups`.
    """
    if groups_per_micro_batch < 1:
        raise ConfigError(f"training.groups_per_micro_batch must be >= 1, got {groups_per_micro_batch}")
    for first in range(0, batch.groups, groups_per_micro_batch):
        rows = slice(first * batch.responses_per_prompt, (first + groups_per_micro_batch) * batch.responses_per_prompt)
        width = max(batch.lengths[rows])
        yield (
            first,
            Batch(
                tokens_BT=batch.tokens_BT[rows, :width],
                response_mask_BT=batch.response_mask_BT[rows, :width],
                ref_logp_B=batch.ref_logp_B[rows],
                reward_B=batch.reward_B[rows],
                responses_per_prompt=batch.responses_per_prompt,
                lengths=batch.lengths[rows],
            ),
        )


def _counted(trajectory: Trajectory, include_eos: bool) -> int:
    """How many of the response's tokens count."""
    if len(trajectory.ref_logps) != trajectory.length:
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r}: {trajectory.length} response tokens, "
            f"but {len(trajectory.ref_logps)} reference log-probabilities"
        )
    if not trajectory.finished or include_eos:
        return trajectory.length
    if not trajectory.length:
        raise DataError(f"trajectory {trajectory.trajectory_id!r}: finished, but without an EOS token")
    return trajectory.length - 1


def _check_groups(trajectories: Sequence[Trajectory], k: int) -> None:
    if k < 2:
        raise ConfigError(f"training.responses_per_prompt must be >= 2, or nothing is learnt, got {k}")
    if not trajectories or len(trajectories) % k:
        raise DataError(f"a batch is whole groups of {k} trajectories, got {len(trajectories)} trajectories")
    for first in range(0, len(trajectories), k):
        prompts = dict.fromkeys(t.prompt_id for t in trajectories[first : first + k])
        if len(prompts) > 1:
            raise DataError(
                f"group {first // k} (rows {first} to {first + k - 1}) must have one prompt, got "
                f"{', '.join(map(repr, prompts))}"
            )
