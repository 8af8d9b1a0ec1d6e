"""Trajectories in the form in which a replay buffer fetches them, without a buffer."""

from collections.abc import Sequence

import numpy as np

from tba.fetched import Fetched, Lists
from tba.types import Trajectory


def fetched_of(trajectories: Sequence[Trajectory]) -> Fetched:
    """Return these trajectories as a buffer would fetch them."""
    return Fetched(
        trajectory_ids=[t.trajectory_id for t in trajectories],
        prompt_ids=[t.prompt_id for t in trajectories],
        prompt_tokens=Lists.of([t.prompt_tokens for t in trajectories], np.int32),
        response_tokens=Lists.of([t.response_tokens for t in trajectories], np.int32),
        ref_logps=_ref_logps(trajectories),
        reward_B=np.array([t.reward for t in trajectories], np.float64),
        finished_B=np.array([t.finished for t in trajectories], bool),
        behaviour_logps=Lists.of([t.behaviour_logps for t in trajectories], np.float32),
        loss_mask=_masks(trajectories),
        step_ends=Lists.of([t.step_ends or () for t in trajectories], np.int32),
        step_values=Lists.of([t.step_values or () for t in trajectories], np.float32),
    )


def _ref_logps(trajectories: Sequence[Trajectory]) -> Lists | None:
    found = [t.ref_logps for t in trajectories if t.ref_logps is not None]
    return Lists.of(found, np.float32) if len(found) == len(trajectories) else None


def _masks(trajectories: Sequence[Trajectory]) -> Lists | None:
    if all(t.loss_mask is None for t in trajectories):
        return None
    masks = [(True,) * t.length if t.loss_mask is None else t.loss_mask for t in trajectories]
    return Lists(np.array([it for mask in masks for it in mask], bool), np.array([len(mask) for mask in masks]))
