"""Batches whose groups have very different lengths, and states of learners, for tests of ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, trajectory
from tba.batches.batching import Batch, collate
from tba.config import Config
from tba.models import adapters
from tba.models.adapters import AdapterSnapshot
from tba.models.policy import Policy
from tba.train.learner import Learned, Learner
from tba.train.training_state import TrainingState
from tests.support.tba.a_rank import precise_policy
from tests.support.tba.trainers import settings

P, K = 5, 3
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def batch_at(step: int) -> Batch:
    """Return a batch of groups of very different lengths."""
    chance = Random(step)
    rows = [
        trajectory(
            prompt_id=f"p{group}",
            prompt_tokens=(5, 6, *range(10, 10 + group)),
            response_tokens=(*(chance.randrange(10, 60) for _ in range(chance.randrange(1, 4 + 6 * group))), EOS_ID),
            reward=float(chance.random() < 0.5),
        )
        for group in range(P)
        for _ in range(K)
    ]
    known = [
        replace(
            row, ref_logps=(-1.5,) * row.length, behaviour_logps=(-1.0,) * row.length, step_ends=(1, row.length),
            step_values=(0.5, chance.random()),
        )
        for row in rows
    ]  # fmt: skip
    return collate(
        fetched_of(known), responses_per_prompt=K, pad_id=PAD_ID, include_eos=True, by_token=True, by_step=True
    )


def config_of(**changes: Any) -> Config:
    return settings(
        **{
            "training__prompts_per_step": P,
            "training__responses_per_prompt": K,
            "search__initial_fill": P * K,
            **changes,
        }
    )


def save(state: TrainingState, folder: Path) -> None:
    """Save a state with the parts that the other ranks have stored."""
    folder.mkdir()
    state.save(folder)
    for part in state.others():
        Path(part["folder"], part["name"]).rename(folder / part["name"])


def check_same(found: Learned, expected: Learned) -> None:
    """Check that the results of a step are equal up to the rounding of sums."""
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-7)
    assert [(it.slot, it.position) for it in found.outcomes] == [(it.slot, it.position) for it in expected.outcomes]
    for name in ("advantage", "residual", "log_z", "logp", "ref_logp"):
        ours, theirs = ([getattr(it, name) for it in learned.outcomes] for learned in (found, expected))
        assert [it is None for it in ours] == [it is None for it in theirs]
        known = [it for it in theirs if it is not None]
        assert [it for it in ours if it is not None] == pytest.approx(known, rel=1e-5, abs=1e-6)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """Return the weights that a version of the policy has: all, or those of the adapter."""
    snapshot = learner.snapshot()
    return dict(snapshot.weights if isinstance(snapshot, AdapterSnapshot) else snapshot.model.named_parameters())


def copied(learner: Learner) -> Callable[[], Policy]:
    """Return a function that makes copies of the learner's current policy."""
    weights = {name: it.clone() for name, it in weights_of(learner).items()}

    def make() -> Policy:
        policy = precise_policy(config=learner.config, tied=True)
        own = adapters.weights_of(policy.model) if policy.adapter else dict(policy.model.named_parameters())
        with torch.no_grad():
            for name, it in weights.items():
                own[name].copy_(it)
        return policy

    return make
